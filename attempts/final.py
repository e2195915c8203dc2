import stub, os, sys, torch, numpy as np
from foveate.kernels import triton_sparse as ts, triton_lists as tls, bits
from sweep import randmask, bench
def real(H,R,N,qt):
    m=torch.from_numpy(np.load(os.path.join(stub.root,'.carry/k/realmask.npy'))).cuda(); h=torch.arange(H,device='cuda')%3; r=torch.arange(R,device='cuda')*(qt//64)%130; c=torch.arange(N,device='cuda')%130
    return m[h[:,None,None],r[None,:,None],c[None,None,:]][None].contiguous()
def case(D,qt,kind,dens=.1,S=131072,H=8,pool=False,rep=5):
    R,N=-(-S//qt),-(-S//64); mask=real(H,R,N,qt) if kind=='real' else randmask(H,R,N,dens)
    q,k,v,do=(torch.randn(1,S,H,D,device='cuda',dtype=torch.bfloat16) for _ in range(4)); w=bits.pack(mask); del mask
    kw=dict(query_tile=qt,kv_tile=64,scale=D**-.5,pooled=torch.ones(H,dtype=torch.bool,device='cuda') if pool else None)
    o,l=ts.forward(q,k,v,w,**kw); ts.backward(do,None,q,k,v,o,l,w,**kw); torch.cuda.synchronize()
    f=bench(lambda:ts.forward(q,k,v,w,**kw),rep); b=bench(lambda:ts.backward(do,None,q,k,v,o,l,w,**kw),rep)
    print(f'D{D} S{S} H{H} qt{qt} {kind} {dens} pool={pool}: forward {f:.2f} backward {b:.2f} sum {f+b:.2f} finite {bool(o.isfinite().all())}',flush=True)
    return lambda:(ts.forward(q,k,v,w,**kw),ts.backward(do,None,q,k,v,o,l,w,**kw))
def safe(*a,**k):
    try: return case(*a,**k)
    except Exception as e: print('FAIL',a,k,str(e)[-200:],flush=True)
f=safe(128,128,'rand')
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CUDA]) as p:
    for _ in range(3): f()
    torch.cuda.synchronize()
for e in sorted(p.key_averages(),key=lambda e:-e.device_time_total)[:12]: print(f'   {e.key[:60]:60s} {e.device_time_total/3000:.3f} ms/iter  calls {e.count//3}')
del f
safe(128,128,'real'); safe(128,128,'rand',pool=True)
ts.HOPPER['forward'][128,128]=ts.Config(64,64,4,3); ts._config.cache_clear(); print('forward m64:'); safe(128,128,'rand'); safe(128,128,'rand',pool=True); ts.HOPPER['forward'][128,128]=ts.Config(128,64,4,2); ts._config.cache_clear()
safe(128,64,'rand'); safe(128,64,'real'); safe(128,128,'rand',.026); safe(64,128,'rand'); safe(64,64,'rand'); safe(64,128,'real'); safe(128,128,'rand',S=32768)
safe(128,128,'rand',S=131072-37)
safe(128,128,'rand',.026,S=524288,H=12,rep=1)
