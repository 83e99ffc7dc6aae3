from __future__ import annotations
import copy, math
from collections.abc import Callable
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.strategies.deferred import Deferred, deferred_model
from stormo.strategies.tape import CannotDeferError
from stormo.tasks.gpt import Gpt
from stormo.tasks.gpt_sizes import Size
from stormo.tasks.wide_resnet import WideResNet

MODELS={}
def model(f): MODELS[f.__name__]=f; return f
@model
def lin(): return nn.Linear(300,200)
@model
def conv(): return nn.Sequential(nn.Conv2d(3,8,3), nn.BatchNorm2d(8), nn.ConvTranspose1d(3,4,5))
@model
def emb(): return nn.Embedding(1000,64, padding_idx=3)
@model
def lstm(): return nn.LSTM(30,40,2,bidirectional=True)
@model
def mha(): return nn.MultiheadAttention(32,4)
@model
def enc(): return nn.TransformerEncoder(nn.TransformerEncoderLayer(32,4), 3, enable_nested_tensor=False)
@model
def tr(): return nn.Transformer(32,4,2,2,64,batch_first=True)
@model
def gpt(): return Gpt(Size(num_layers=2,num_heads=2,width=32, block=16), block=16, vocabulary=50)
@model
def wrn(): return WideResNet(1)
@model
def ortho():
    m=nn.Linear(30,50); nn.init.orthogonal_(m.weight); nn.init.trunc_normal_(m.bias); return m
@model
def wn():
    return nn.utils.parametrizations.weight_norm(nn.Linear(30,20))
@model
def sn():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(30,20))
@model
def orp():
    return nn.utils.parametrizations.orthogonal(nn.Linear(30,20))
@model
def oldwn():
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(30,20))
@model
def legacy():
    m=nn.Module(); m.a=nn.Parameter(torch.Tensor(30,4)); nn.init.kaiming_uniform_(m.a, a=math.sqrt(5)); m.b=nn.Parameter(torch.FloatTensor(3).fill_(2)); m.c=nn.Parameter(m.a.data.new(5).zero_()); m.d=nn.Parameter(torch.Tensor([1,2])); return m
@model
def nump():
    m=nn.Linear(4,4); m.weight.data=torch.from_numpy(np.random.RandomState(0).randn(4,4).astype(np.float32)); m.p=nn.Parameter(torch.from_numpy(np.ones(4))); m.q=m.p
    with torch.no_grad(): m.bias.copy_(torch.from_numpy(np.arange(4.)))
    return m
@model
def misc():
    m=nn.Linear(40,40); m.weight.data[:2]=0; m.weight.data[m.weight.data>0.1]=0.5
    with torch.no_grad(): m.bias.copy_(m.weight.sum(0))
    m.r=nn.Parameter(torch.randn(30,30)*0.02)
    m.register_buffer("pos", torch.arange(5), persistent=False)
    m.register_buffer("mask", torch.tril(torch.ones(5,5)).view(1,1,5,5))
    rates=[x.item() for x in torch.linspace(0,.1,5)]
    m.s=nn.Parameter(torch.full((3,), rates[3]))
    m.perm=torch.randperm(7)[2:]
    m.idx=[torch.arange(3), {"a": torch.rand(2,requires_grad=True)}]
    if m.bias[0]>0: nn.init.normal_(m.weight[3:5])
    m.tied=m.weight
    assert m.weight.device.type=="cpu"
    m.g=nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(3)))
    m.x=nn.Parameter(torch.bernoulli(torch.full((20,),.3)))
    m.multi=nn.Parameter(torch.multinomial(torch.rand(10),5).float())
    m.cpx=nn.Parameter(torch.randn(4,dtype=torch.cfloat).conj()*2)
    m.nz=nn.Parameter(m.weight[m.weight>0].clone().detach())
    m.np=m.weight.detach().numpy().sum()
    return m
@model
def dummy():
    m=nn.Sequential(nn.Conv2d(1,4,3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten())
    n=m(torch.rand(2,1,8,8)).shape[1]
    m.append(nn.Linear(n,3)); return m.double()
@model
def deep():
    a=nn.Sequential(nn.Linear(10,10)); b=copy.deepcopy(a); 
    with torch.no_grad(): b[0].weight.mul_(.5).add_(a[0].weight.cpu()); a[0].weight.zero_()
    torch.manual_seed(5); 
    return nn.ModuleList([a,b,nn.Linear(3,3)])

def bits(t): return t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all(name,dtype):
    make=MODELS[name]
    torch.set_default_dtype(dtype)
    torch.manual_seed(1); plain=make(); st=torch.get_rng_state()
    torch.manual_seed(1); d=deferred_model(make)
    assert torch.equal(st, torch.get_rng_state())
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(2)
    want=dict(plain.named_parameters(remove_duplicate=False))|dict(plain.named_buffers(remove_duplicate=False))
    assert set(want)==set(d.names)
    s=torch.get_rng_state()
    for n,w in want.items():
        v=d.value(n)
        assert v.dtype==w.dtype and v.stride()==w.stride(), n
        assert v.device.type=="cpu"
        assert torch.equal(bits(v), bits(w)), n
    assert torch.equal(s,torch.get_rng_state())
    assert all(p.is_meta for p in d.module.parameters())
    assert all(p.is_meta for p in d.module.buffers())
    assert len(list(d.module.parameters()))==len(list(plain.parameters()))
    for n,p in plain.named_parameters(): assert d.module.get_parameter(n).requires_grad==p.requires_grad
    for k,v in vars(plain).items():
        if isinstance(v,Tensor): assert torch.equal(v, vars(d.module)[k]),k
