import stub, sys, os, time
import torch, triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GTD
from foveate.kernels import triton_sparse as ts, triton_lists as tls, triton_hopper as th, reference, bits
from sweep import randmask, bench
import numpy as np
def desc(x,rows,D):
    x=x.transpose(1,2); bw=min(128,D*x.element_size())
    return GTD(x,list(x.shape),list(x.stride()),[1,1,rows,D],gl.NVMMASharedLayout(swizzle_byte_width=bw,element_bitwidth=16,rank=4))
def sdesc(x): return GTD(x,list(x.shape),list(x.stride()),[1,64],gl.NVMMASharedLayout(swizzle_byte_width=0,element_bitwidth=32,rank=2))
class G:
    """Gluon runners with prepared lists."""
    def __init__(s,q,k,v,do,w,qt,scale,pooled=None):
        s.j=ts._Job(q,k,w,qt,64,scale,pooled); s.q,s.k,s.v,s.do,s.w,s.pooled=q,k,v,do,w,pooled
        s.ql=tls.query_lists(w,s.j.columns); s.kl=tls.key_lists(w,s.j.columns); s.qo=tls.hot_first(s.ql[1]); s.ko=tls.hot_first(s.kl[1] if s.j.repeats==1 else s.kl[1].unflatten(1,(s.j.groups,-1)).sum(2))
        s.mk,s.mv=s.j.means(k,v)
    def forward(s,rows=64,stages=2,rs=True,regs=None):
        j=s.j; D=j.block; out=torch.empty_like(s.q); lse=torch.empty(j.batch,j.heads,j.tokens,device='cuda')
        d=[desc(s.q,rows,D)]+[desc(x,64,D) for x in (s.k,s.v,s.mk,s.mv)]+[desc(out,rows,D)]
        th._forward[(j.rows*(j.query_tile//rows),j.batch*j.heads)](*d,lse,*s.ql,s.qo,s.w,s.pooled,j.scale2,j.tokens,j.keys,j.rows,j.columns,j.width,j.heads,j.repeats,D=D,ROWS=rows,EVEN=j.even,POOL=s.pooled is not None,STAGES=stages,QUERY_TILE=j.query_tile,RS=rs,num_warps=rows//16,maxnreg=regs)
        return out,lse
    def queries(s,stats,rows=64,stages=2,rs=True):
        j=s.j; D=j.block; dq=torch.empty_like(s.q)
        th._grad_queries[(j.rows*(j.query_tile//rows),j.batch*j.heads)](desc(s.q,rows,D),*(desc(x,64,D) for x in (s.k,s.v,s.mk,s.mv)),desc(s.do,rows,D),desc(dq,rows,D),*stats,*s.ql,s.qo,s.w,s.pooled,j.scale,j.scale2,stats[0].shape[1],j.keys,j.rows,j.columns,j.width,j.heads,j.repeats,D=D,ROWS=rows,QUERY_TILE=j.query_tile,EVEN=j.even,POOL=s.pooled is not None,STAGES=stages,RS=rs,num_warps=rows//16)
        return dq
    def keys(s,stats,stages=2,kind=0,regs=None,far=(None,None,0)):
        j=s.j; D=j.block; dk=torch.empty_like(s.k); dv=torch.empty_like(s.v)
        d=[desc(x,64,D) for x in (s.q,s.k,s.v,s.do,dk,dv)]
        kw=dict(DIM=j.dim,D=D,QUERY_TILE=j.query_tile,REP=j.repeats,POOL=far[2]>0,STAGES=stages,num_warps=4,maxnreg=regs)
        grid=(j.columns,j.batch*j.groups)
        if kind==0: th._grad_keys[grid](*d,*stats,*s.kl,s.ko,*far[:2],j.scale,j.scale2,stats[0].shape[1]//64,j.keys,j.rows,j.columns,j.heads,j.groups,far[2],**kw)
        else: (th._grad_keys_ws if kind==1 else th._grad_keys_v1)[grid](*d,*(sdesc(x) for x in stats),*s.kl,s.ko,*far[:2],j.scale,j.scale2,j.keys,j.rows,j.columns,j.heads,j.groups,far[2],**kw)
        return dk,dv
rel=lambda a,b:((a.double()-b).norm()/b.norm()).item()
def data(B,S,H,Gr,D,seed=0,hm=False):
    g=torch.Generator('cuda').manual_seed(seed); r=lambda h: torch.randn(B,S,h,D,device='cuda',dtype=torch.bfloat16,generator=g)
    return r(H),r(Gr),r(Gr),r(H)
def gate(S,H,Gr,D,qt,pool,cfg,scale_in=1):
    q,k,v,do=data(1,S,H,Gr,D); q,k=q*scale_in,k*scale_in
    R,N=-(-S//qt),-(-S//64); mask=randmask(H,R,N,.3); mask[0,0,0]=False; w=bits.pack(mask)
    pooled=(torch.arange(H,device='cuda')%2==0) if pool else None
    kw=dict(query_tile=qt,kv_tile=64,scale=D**-.5,pooled=pooled)
    ref=[x.double().requires_grad_() for x in (q,k,v)]; o,l=reference.forward(*ref,w,**kw); gr=torch.autograd.grad((o*do.double()).sum(),ref)
    G_=G(q,k,v,do,w,qt,D**-.5,pooled); e={}
    for name,c in cfg:
        try:
            if name=='forward': a,b=G_.forward(*c); f=l.isfinite(); e[name,c]=(rel(a,o),rel(b[f],l[f]))
            else:
                stats=ts.row_stats(do,None,o.to(q.dtype),l.float(),R*qt)
                if name=='queries': e[name,c]=(rel(G_.queries(stats,*c),gr[0]),)
                else:
                    ts.CONFIGS={'keys':ts.Config(64,64,4,2,1)}; far=ts._run_grad_means(G_.j,q,(G_.mk,G_.mv),do,stats,w) if pool else (None,None,0)
                    e[name,c]=tuple(rel(a,b) for a,b in zip(G_.keys(stats,*c,far=far),gr[1:]))
        except Exception as ex: e[name,c]=str(ex)[-200:]
        torch.cuda.synchronize()
        print('gate',S,H,Gr,D,qt,pool,scale_in,name,c,e[name,c] if isinstance(e[name,c],str) else [f'{x:.1e}' for x in e[name,c]],flush=True)
def time_all(D,qt,variants,S=131072,H=8,dens=.1,mn='rand',pool=False):
    q,k,v,do=data(1,S,H,H,D); R,N=S//qt,S//64
    if mn=='rand': mask=randmask(H,R,N,dens)
    else:
        m=torch.from_numpy(np.load(os.path.join(stub.root,'.carry/realmask.npy'))).cuda(); h=torch.arange(H,device='cuda')%3; r=torch.arange(R,device='cuda')*(qt//64)%130; c=torch.arange(N,device='cuda')%130
        mask=m[h[:,None,None],r[None,:,None],c[None,None,:]][None].contiguous()
    kept=mask.sum().item(); w=bits.pack(mask); pooled=torch.ones(H,device='cuda',dtype=torch.bool) if pool else None
    G_=G(q,k,v,do,w,qt,D**-.5,pooled); del mask
    o,l=G_.forward(*[c for n,c in variants if n=='forward'][0]); stats=ts.row_stats(do,None,o,l,S)
    for name,c in variants:
        f={'forward':lambda:G_.forward(*c),'queries':lambda:G_.queries(stats,*c),'keys':lambda:G_.keys(stats,*c)}[name]
        try:
            ms=bench(f); fl={'forward':4,'queries':6,'keys':8}[name]*kept*qt*64*D
            print(f'D{D} qt{qt} {mn} {name} {c}: {ms:.2f} ms {fl/ms/1e9:.0f} TF',flush=True)
        except Exception as ex: print('FAIL',name,c,str(ex)[-150:],flush=True)
    j=G_.j
    for name,c in (('forward',(128,64,4,2,0) if qt==128 else (64,64,4,3,0)),('queries',(128,64,8,3,0) if qt==128 else (64,64,4,2,0)),('keys',(64,64,4,2,1))):
        ts.CONFIGS={name:ts.Config(*c)}; ts.query_lists=lambda *a:G_.ql; ts.key_lists=lambda *a:G_.kl; ts.hot_first=lambda x:G_.qo if x is G_.ql[1] else G_.ko
        f={'forward':lambda:ts.forward(q,k,v,w,query_tile=qt,kv_tile=64,scale=D**-.5,pooled=None),'queries':lambda:ts._run_grad_queries(j,q,k,v,(k,v),do,stats,w),'keys':lambda:ts._run_grad_keys(j,q,k,v,do,stats,(None,None,0),w)}[name]
        if not pool: print(f'  triton {name} {c}: {bench(f):.2f} ms',flush=True)
if __name__=='__main__':
    V128=[('forward',(64,2,True)),('forward',(64,2,False)),('forward',(64,3,True)),('forward',(128,2,True)),('forward',(128,3,True)),('forward',(64,2,True,168)),('queries',(64,2,True)),('queries',(64,2,False)),('queries',(128,2,True)),('queries',(128,3,True)),('keys',(2,0))]
    V64=[c for c in V128 if c[1][0] not in (128,)]
    for D in (128,64): gate(1000,2,2,D,128,True,V128)
    for D,qt,mn in ((128,128,'rand'),(128,64,'rand'),(128,128,'real'),(128,64,'real'),(64,128,'rand'),(64,64,'rand')): time_all(D,qt,(V128 if qt==128 else V64)+([('forward',(64,4,True)),('queries',(64,3,True)),('queries',(64,4,True))] if D==64 else []),mn=mn)
