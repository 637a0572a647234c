# SPDX-License-Identifier: Apache-2.0
"""What the table's columns are: perplexity, KL to BF16, top-1 agreement, relative L2, intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Neighbouring tokens share context, so the bootstrap draws blocks of them and not single tokens.
BOOTSTRAP_BLOCK = 64
BOOTSTRAP_SAMPLES = 2000


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


def bootstrap_interval(
    values: torch.Tensor,
    seed: int,
    *,
    block: int = BOOTSTRAP_BLOCK,
    samples: int = BOOTSTRAP_SAMPLES,
) -> tuple[float, float]:
    """95% percentile interval of the mean of ``values`` [n], resampling blocks of tokens.

    A last block shorter than ``block`` takes part with the weight of its tokens.
    """
    blocks = values.double().split(block)
    sums = torch.stack([b.sum() for b in blocks])
    sizes = torch.tensor([b.numel() for b in blocks], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(len(blocks), (samples, len(blocks)), generator=generator)
    means = sums[draw].sum(dim=1) / sizes[draw].sum(dim=1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def relative_l2(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||out - exact|| / ||exact|| per head, fp64 [Hq], for out and exact [T, Hq, D]."""
    error = (out.double() - exact.double()).pow(2).sum(dim=(0, 2)).sqrt()
    return error / exact.double().pow(2).sum(dim=(0, 2)).sqrt()
