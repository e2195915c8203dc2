"""Attention kernels: tensors in, tensors out. Nothing here imports the rest of foveate.

Every sparse kernel module offers the same two plain functions (see `reference.py`, the oracle):

    forward(q, k, v, words, *, query_tile, kv_tile, scale, pooled)                         -> out, lse
    backward(dout, dlse, q, k, v, out, lse, words, *, query_tile, kv_tile, scale, pooled)  -> dq, dk, dv

pooled: float32 (H,), what is added to the logits of a head's tile means (0: pooled, -inf: dropped); None drops all.

`out` and `lse` handed to `backward` may be those of a *larger* attention that this one is a part of (ring or
remembered states): probabilities are recomputed as exp(s - lse), so the gradients are right for the merged result.

Results have q's dtype. A module with `RETURNS_FLOAT32` also takes `dtype`, so that parts of 16-bit inputs can be merged
before they are rounded.
"""
