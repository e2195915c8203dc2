"""Dense attention with its log-sum-exp, and a backward that takes them, through torch's own kernels.

Shapes: B batch, S tokens (M queries, S keys), H heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention of q (B, M, H, D) over k, v (B, S, G, D): out (B, M, H, D), lse float32 (B, H, M)."""
    qh, kh, vh = _by_head(q, k, v)
    out, lse = _kernel(q)[0](qh, kh, vh, scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]]


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for outer gradients dout (B, M, H, D) and dlse (B, H, M) of (out, lse).

    `out` and `lse` may be those of a larger attention that these keys are a part of.
    """
    dim, groups = q.shape[-1], k.shape[2]
    if dlse is not None:
        dout, q, k, v, out = with_lse_gradient(dout, dlse, q, k, v, out)
    qh, kh, vh = _by_head(q, k, v)
    douth, outh = (_for_kernel(x.transpose(1, 2)) for x in (dout, out))
    dq, dk, dv = _kernel(q)[1](douth, qh, kh, vh, outh, lse.contiguous(), scale)
    dq, dk, dv = (x.transpose(1, 2)[..., :dim] for x in (dq, dk, dv))
    if groups != q.shape[2]:
        dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
    return dq, dk, dv


def with_lse_gradient(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    """dout, q, k, v, out, widened so that a kernel which knows `delta = sum(dout * out)` only uses delta - dlse.

    One further head-dim column of value 0, output 1 and gradient -dlse (B, H, M) does it and changes nothing else;
    8 columns keep the alignment that kernels ask for.
    """
    dim = q.shape[-1]
    dout, q, k, v, out = (torch.nn.functional.pad(x, (0, 8)) for x in (dout, q, k, v, out))
    out[..., dim] = 1.0
    dout[..., dim] = -dlse.transpose(1, 2).to(dout.dtype)
    return [dout, q, k, v, out]


def row_kernels(device: torch.device):
    """Forward and backward of many short rows: q (g, 1, m, D), k, v (g, 1, c, D), bias (g, 1, m, c) or None.

    forward(q, k, v, scale, bias) -> out, lse; backward(dout, q, k, v, out, lse, scale, bias) -> dq, dk, dv.
    """
    return (_cpu_forward, _cpu_backward) if device.type == "cpu" else (_plain_forward, _plain_backward)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """(B, S, H, D) -> (B, H, S, D): contiguous for torch's CPU kernel, several times slower on strided inputs."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
    return [_for_kernel(x.transpose(1, 2)) for x in (q, k, v)]


def _for_kernel(x: Tensor) -> Tensor:
    """x (B, H, S, D) as kernels want it: GPU's read any strides over contiguous rows, in multiples of 16 bytes."""
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3]))
    aligned = x.stride(-1) == 1 and all(step > 0 and step % 16 == 0 for step in steps)
    return x if x.is_cuda and aligned else x.contiguous()


def _kernel(q: Tensor):
    if q.device.type != "cuda":
        return _cpu_forward, _cpu_backward
    return (_efficient_forward, _efficient_backward) if q.dtype == torch.float32 else (_cudnn_forward, _cudnn_backward)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None = None
):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale
    )


def _plain_logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    logits = scale * q @ k.mT
    return logits if bias is None else logits + bias


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None):
    logits = _plain_logits(q, k, scale, bias)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
):
    weights = (_plain_logits(q, k, scale, bias) - lse.unsqueeze(-1)).exp()
    delta = (dout * out).sum(-1, keepdim=True)
    dlogits = scale * weights * (dout @ v.mT - delta)
    return dlogits @ k, dlogits.mT @ q, weights.mT @ dout


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float):
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        False,
        scale=scale,
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float):
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, lse


def _efficient_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], False, scale=scale
    )
    return dq, dk, dv
