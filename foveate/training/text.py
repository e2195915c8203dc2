"""Captions as embeddings, by a sentence encoder from a folder or hub name (transformers, extra `diffusers`)."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def embed_captions(captions: Iterable[str], encoder: str) -> dict[str, Tensor]:
    """From each different caption (and "" for none) to its mean-pooled, unit-length embedding, float32 (text_dim,)."""
    try:
        from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("captions need a text encoder: pip install 'foveate[diffusers]'") from None
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    table = {}
    for caption in sorted({"", *captions}):
        tokens = tokenizer(caption, return_tensors="pt", truncation=True)
        table[caption] = torch.nn.functional.normalize(model(**tokens).last_hidden_state[0].mean(0), dim=0)
    return table
