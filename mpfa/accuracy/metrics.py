# SPDX-License-Identifier: Apache-2.0
"""What tables show: perplexity, KL to BF16, top-1 agreement, attention error, bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Neighbouring tokens share context, so the bootstrap draws blocks of them and not single tokens.
BOOTSTRAP_BLOCK = 64
BOOTSTRAP_SAMPLES = 2000
# Measured coverage of the nominal 95 % interval, skewed values that move together within a block:
# 8 blocks 90 %, 16: 91 %, 24: 93 %, 32: 93 to 95 %. Fewer blocks say nothing that is worth printing.
MIN_BLOCKS = 8


@dataclass(frozen=True)
class TokenScores:
    """Per scored token, fp64 [n] (top1: bool [n]).

    Attributes:
        nll: -ln p(target), nats.
        kl: KL(reference || this) over the vocabulary, nats; 0 for the reference itself.
        top1: the most likely next token is the reference's.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    top1: torch.Tensor

    @property
    def perplexity(self) -> float:
        return float(self.nll.mean().exp())


def score_log_probs(
    log_probs: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None
) -> TokenScores:
    """Scores of one chunk.

    Args:
        log_probs: fp32 [n, V].
        targets: int64 [n].
        reference: fp32 [n, V] log-probabilities of the reference, None when this is the reference.
    """
    nll = -log_probs.gather(1, targets[:, None]).squeeze(1).double()
    if reference is None:
        return TokenScores(nll, torch.zeros_like(nll), torch.ones_like(targets, dtype=torch.bool))
    kl = (reference.exp() * (reference - log_probs)).sum(dim=1, dtype=torch.float64)
    top1 = log_probs.argmax(dim=1) == reference.argmax(dim=1)
    return TokenScores(nll, kl, top1)


def concatenate(chunks: list[TokenScores]) -> TokenScores:
    return TokenScores(
        nll=torch.cat([c.nll for c in chunks]),
        kl=torch.cat([c.kl for c in chunks]),
        top1=torch.cat([c.top1 for c in chunks]),
    )


@dataclass(frozen=True)
class BlockSums:
    """Sums of per-token values over blocks of neighbouring tokens, fp64 [..., C], and their counts."""

    sums: torch.Tensor
    counts: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        return self.sums.sum(dim=-1) / self.counts.sum()


def whole_blocks(counts: torch.Tensor) -> int:
    """How many blocks an interval rests on: those of ``counts`` [C], or the tokens for so many."""
    return min(len(counts), int(counts.sum()) // BOOTSTRAP_BLOCK)


def too_few_blocks(count: int) -> str:
    """Why there is no interval."""
    return (
        f"{count} block{'' if count == 1 else 's'} of {BOOTSTRAP_BLOCK} tokens, fewer than the "
        f"{MIN_BLOCKS} that an interval needs"
    )


def block_sums(values: torch.Tensor, block: int = BOOTSTRAP_BLOCK) -> BlockSums:
    """Blocks of ``values`` [W, n] of W windows; none spans two windows, the last may be shorter."""
    blocks = [b for window in values.double() for b in window.split(block)]
    return BlockSums(
        torch.stack([b.sum() for b in blocks]),
        torch.tensor([b.numel() for b in blocks], dtype=torch.float64),
    )


def resample(num_blocks: int, seed: int, samples: int = BOOTSTRAP_SAMPLES) -> torch.Tensor:
    """Bootstrap weights fp64 [samples, C]: how often each block is drawn, C draws per sample."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(num_blocks, (samples, num_blocks), generator=generator)
    weights = torch.zeros(samples, num_blocks, dtype=torch.float64)
    return weights.scatter_add_(1, draw, torch.ones_like(weights))


def percentile_interval(values: torch.Tensor) -> tuple[float, float]:
    """95% percentile interval of bootstrap values [samples]."""
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def mean_interval(blocks: BlockSums, seed: int) -> tuple[float, float]:
    """95% interval of the mean over all tokens."""
    weights = resample(len(blocks.sums), seed)
    return percentile_interval((weights @ blocks.sums) / (weights @ blocks.counts))


def recovered(blocks: BlockSums, direct: BlockSums, seed: int) -> tuple[float, float, float]:
    """Rec. = 1 - x / x_direct of two means over the same tokens (paper Table 2), low, high.

    x is a loss against BF16: a KL, or the increase of the negative log-likelihood. The interval is
    paired: numerator and denominator are taken from the same draws.
    """
    weights = resample(len(blocks.sums), seed)
    drawn = 1 - (weights @ blocks.sums) / (weights @ direct.sums)
    return float(1 - blocks.sums.sum() / direct.sums.sum()), *percentile_interval(drawn)


def bootstrap_interval(
    values: torch.Tensor, seed: int, *, block: int = BOOTSTRAP_BLOCK
) -> tuple[float, float]:
    """95% percentile interval of the mean of ``values`` [n], resampling blocks of tokens.

    A last block shorter than ``block`` takes part with the weight of its tokens.
    """
    return mean_interval(block_sums(values[None], block), seed)


def relative_l2(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||out - exact|| / ||exact|| per head, fp64 [Hq], for out and exact [T, Hq, D]."""
    error = (out.double() - exact.double()).pow(2).sum(dim=(0, 2)).sqrt()
    return error / exact.double().pow(2).sum(dim=(0, 2)).sqrt()


@dataclass(frozen=True)
class AttentionErrors:
    """Attention output against float64 in blocks of tokens, fp64 [L, Hq, C] each.

    Attributes:
        error, norm: sums of |out - exact|^2 and |exact|^2.
        cosine: sums over tokens of the cosine between out and exact.
        counts: [C], tokens of each block.
    """

    error: torch.Tensor
    norm: torch.Tensor
    cosine: torch.Tensor
    counts: torch.Tensor

    def rel_l2_by_head(self) -> torch.Tensor:
        """fp64 [L, Hq]: relative L2 error over all tokens."""
        return (self.error.sum(-1) / self.norm.sum(-1)).sqrt()

    def cosine_by_head(self) -> torch.Tensor:
        return self.cosine.sum(-1) / self.counts.sum()

    def rel_l2_interval(self, seed: int) -> tuple[float, float]:
        """95% interval of the mean over layers and heads of the relative L2 error."""
        weights = resample(len(self.counts), seed).T
        return percentile_interval(
            ((self.error @ weights) / (self.norm @ weights)).sqrt().mean((0, 1))
        )

    def cosine_interval(self, seed: int) -> tuple[float, float]:
        weights = resample(len(self.counts), seed).T
        return percentile_interval((self.cosine @ weights).mean((0, 1)) / (self.counts @ weights))


def attention_errors(
    outs: list[torch.Tensor], exacts: list[torch.Tensor], block: int = BOOTSTRAP_BLOCK
) -> list[torch.Tensor]:
    """[error, norm, cosine], fp64 [Hq, C] each, of one layer over windows of [T, Hq, D]."""
    parts: list[list[torch.Tensor]] = [[], [], []]
    for out, exact in zip(outs, exacts, strict=True):
        out, exact = out.double(), exact.double()
        error = (out - exact).square().sum(-1)
        norm, own = exact.square().sum(-1), out.square().sum(-1)
        # why the floor: a zero vector has no direction; its product is 0 too.
        cosine = (out * exact).sum(-1) / (norm * own).sqrt().clamp_min(1e-300)
        for kept, values in zip(parts, (error, norm, cosine), strict=True):
            kept += [b.sum(dim=0) for b in values.split(block)]
    return [torch.stack(kept, dim=1) for kept in parts]


def block_counts(lens: list[int], block: int = BOOTSTRAP_BLOCK) -> torch.Tensor:
    """fp64 [C]: tokens of the blocks of windows of these lengths."""
    sizes = [min(block, n - begin) for n in lens for begin in range(0, n, block)]
    return torch.tensor(sizes, dtype=torch.float64)
