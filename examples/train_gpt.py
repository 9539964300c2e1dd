"""Trains a small GPT on this library's own README: norms before each branch, rotary queries and keys.

python examples/train_gpt.py
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rmsnorm

STEPS, BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 60, 8, 64, 64, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rotary = rmsnorm.QKNormRotary(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k = self.rotary(q, k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Adds to the stream and normalises it in one pass, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = rmsnorm.RMSNorm(WIDTH), rmsnorm.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, branch: Tensor, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        y, stream = self.attention_norm(branch, stream)
        y, stream = self.mlp_norm(self.attention(y, cos, sin), stream)
        return self.mlp(y), stream


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = rmsnorm.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        half = WIDTH // HEADS // 2
        angles = torch.arange(tokens.shape[1])[:, None, None] * 10000 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        stream = self.embedding(tokens)
        branch = torch.zeros_like(stream)
        for block in self.blocks:
            branch, stream = block(branch, stream, cos, sin)
        y, _ = self.norm(branch, stream)
        return self.head(y)


def main() -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).parents[1].joinpath("README.md").read_bytes()), dtype=torch.uint8)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {loss.item():.3f}")
    # One answer a row: a text has the same logits alone as in a batch, up to what the matrix products do.
    x = torch.randn(BATCH, WIDTH)
    assert torch.equal(model.norm(x)[:1], model.norm(x[:1]))


if __name__ == "__main__":
    main()
