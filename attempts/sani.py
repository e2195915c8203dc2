import stub, torch
from foveate.kernels import triton_sparse as ts, bits
for D,S,qt,G in ((128,333,128,2),(64,200,64,1)):
    q=torch.randn(1,S,2,D,device='cuda',dtype=torch.bfloat16); k,v=(torch.randn(1,S,G,D,device='cuda',dtype=torch.bfloat16) for _ in range(2))
    w=bits.pack(torch.rand(1,2,-(-S//qt),-(-S//64),device='cuda')<.5); kw=dict(query_tile=qt,kv_tile=64,scale=.1,pooled=torch.tensor([True,False],device='cuda'))
    o,l=ts.forward(q,k,v,w,**kw); ts.backward(q,l.clone().nan_to_num(0,0,0),q,k,v,o,l,w,**kw); torch.cuda.synchronize()
print('sanitizer run done')
