# SPDX-License-Identifier: Apache-2.0
"""From final hidden states to token scores, in pieces: all logits of a text would not fit."""

from __future__ import annotations

import torch

from mpfa.accuracy.metrics import TokenScores, concatenate, score_log_probs
from mpfa.accuracy.models import LanguageModel

# Of the logits held at once, fp32: 341 tokens of a vocabulary of 49152, 64 of 262144.
LOGIT_BYTES = 1 << 26


def score(
    language: LanguageModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    reference: torch.Tensor | None,
) -> TokenScores:
    """Scores of final hidden states fp32 [n, hidden] against targets int64 [n].

    ``reference`` holds the reference's hidden states; None when these are the reference's own. Its
    logits are computed again for every row: that costs less than keeping them in memory.
    """
    chunks = []
    vocabulary = language.model.get_output_embeddings().weight.shape[0]
    step = max(1, LOGIT_BYTES // (4 * vocabulary))
    for begin in range(0, len(targets), step):
        part = slice(begin, begin + step)
        log_probs = language.logits(hidden[part]).log_softmax(dim=-1)
        theirs = None
        if reference is not None:
            theirs = language.logits(reference[part]).log_softmax(dim=-1)
        chunks.append(score_log_probs(log_probs, targets[part], theirs))
    return concatenate(chunks)
