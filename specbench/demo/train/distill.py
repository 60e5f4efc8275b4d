"""How a student learns to choose the target's tokens: the loss, the optimizer and the schedule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 4
RATE_FLOOR = 0.03  # of the peak rate, at the end


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that one batch's softmax runs over."""

    weight: Tensor  # [C, hidden]: their rows of the embedding
    correction: Tensor  # [C]: log of how many vocabulary entries a sampled one stands for

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] of *hidden* [N, hidden]."""
        return functional.linear(hidden, self.weight, self.correction)


class CandidateSampler:
    """Frequent tokens plus random others, so that no step pays for the whole vocabulary.

    Sampled logits are corrected for their scarcity, which keeps the softmax calibrated over the
    full vocabulary.
    """

    def __init__(self, embedding: Tensor, frequent: Tensor, negatives: int) -> None:
        self._embedding = embedding  # [vocab, hidden]
        self._frequent = frequent  # [F], sorted
        is_rare = torch.ones(len(embedding), dtype=torch.bool)
        is_rare[frequent] = False
        self._rare = is_rare.nonzero()[:, 0]
        self._negatives = negatives if len(self._rare) else 0

    def draw(self, tokens: Tensor | None = None) -> Candidates:
        """New candidates; those of *tokens* that are rare join as they are, uncorrected."""
        chosen = torch.randint(0, max(1, len(self._rare)), (self._negatives,))
        negatives = self._rare[chosen]
        present = negatives[:0]
        if tokens is not None:
            present = tokens.unique()
            present = present[~torch.isin(present, self._frequent)]
            negatives = negatives[~torch.isin(negatives, present)]
        ids = torch.cat([self._frequent, present, negatives])
        correction = torch.zeros(len(ids))
        if len(negatives):
            correction[-len(negatives) :] = math.log(len(self._rare) / len(negatives))
        return Candidates(self._embedding[ids], correction)


def distillation_loss(
    student: Tensor, teacher: Tensor, candidates: Candidates, soft: float = 0.7
) -> tuple[Tensor, Tensor]:
    """Loss and agreement (share of equal choices) of *student* and *teacher*, both [N, hidden].

    The loss is *soft* x cross-entropy against the teacher's probabilities plus the rest x
    cross-entropy against its choice, over the candidates; a mean over N.
    """
    with torch.no_grad():
        logits = candidates.logits(teacher)
        choice = logits.argmax(-1, keepdim=True)
        wanted = logits.softmax(-1).mul_(soft)
        wanted.scatter_add_(1, choice, torch.full(choice.shape, 1 - soft))
    loss, agreement = _CandidateCrossEntropy.apply(student, candidates, wanted, choice)
    return loss, agreement


class _CandidateCrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped
    """Cross-entropy of linear logits with its gradient, softmax - wanted, in closed form.

    One [N, C] tensor is kept for the way back, and it is made in place.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        student: Tensor,
        candidates: Candidates,
        wanted: Tensor,
        choice: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Mean loss and agreement; *wanted* [N, C] is a distribution, *choice* [N, 1] an index."""
        logits = candidates.logits(student)
        normaliser = logits.logsumexp(-1)
        loss = (normaliser - (wanted * logits).sum(-1)).mean()
        agreement = (logits.argmax(-1, keepdim=True) == choice).float().mean()
        gradient = logits.sub_(normaliser[:, None]).exp_().sub_(wanted).div_(len(student))
        ctx.save_for_backward(gradient, candidates.weight)
        ctx.mark_non_differentiable(agreement)
        return loss, agreement

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, upstream: Tensor, _agreement: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """The gradient for *student*; nothing else is learnt here."""
        gradient, weight = ctx.saved_tensors
        return upstream * (gradient @ weight), None, None, None


class MuonAdamW:
    """Muon (update scaled to AdamW's size) for the matrices, AdamW for the vectors; one rate."""

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float = 0.01) -> None:
        everything = list(parameters)
        self._matrices = [parameter for parameter in everything if parameter.ndim == 2]
        self._vectors = [parameter for parameter in everything if parameter.ndim != 2]
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._weight_decay = weight_decay
        self._adamw = torch.optim.AdamW(self._vectors, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rate: float) -> None:
        """Apply and clear the gradients, clipped to a norm of 1 together."""
        torch.nn.utils.clip_grad_norm_(self._matrices + self._vectors, 1.0)
        with torch.no_grad():
            for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonalized(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - rate * self._weight_decay)
                matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)
                matrix.grad = None
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad()

    def state(self) -> dict[str, object]:
        """What a checkpoint has to keep."""
        return {"momenta": self._momenta, "vectors": self._adamw.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Take up a `state` of an optimizer of the same parameters."""
        saved = state["momenta"]
        assert isinstance(saved, list)
        for momentum, value in zip(self._momenta, saved, strict=True):
            momentum.copy_(value)
        self._adamw.load_state_dict(state["vectors"])


def orthogonalized(matrix: Tensor) -> Tensor:
    """*matrix* with its singular values brought near 1, by Newton-Schulz iteration."""
    linear, cubic, quintic = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix  # the smaller side makes the smaller product
    result = result / (result.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = result @ result.T
        result = linear * result + (cubic * gram + quintic * gram @ gram) @ result
    return result.T if tall else result


def learning_rate(progress: float, peak: float, warm_up: float = 0.04) -> float:
    """The rate at *progress* (0 to 1): a linear warm-up, then a cosine down to a small rest."""
    if progress < warm_up:
        return peak * (progress + 0.002) / warm_up
    fall = min(1.0, (progress - warm_up) / (1 - warm_up))
    return peak * (RATE_FLOOR + (1 - RATE_FLOOR) * 0.5 * (1 + math.cos(math.pi * fall)))
