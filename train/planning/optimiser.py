"""Share of a training step on a processor that the optimiser takes, from a run's configs alone."""

from __future__ import annotations

from torch import nn

from ..config import RunConfig
from ..division import divided
from ..estimate import shape_of
from ..method import AnyMethod
from ..outline import FORWARD, ConfigOnly, config_at, outlined
from ..schedule import hidden_matrices

NEWTON_SCHULZ = 5  # steps of Muon's iteration
ADAMW = 200.0
"""Time of clipping and AdamW's step for one parameter, in operations of a product: 2 ns, while a
thread of a Xeon does 105 GFLOP/s (672M parameters)."""


def optimiser_share(method: AnyMethod, run: RunConfig) -> float:
    """Return the share, 0 to 1, of a step's time on a processor that its optimiser takes.

    All time is counted in operations of products. The replies are taken for all of the text, so
    that the share is larger where they are less. Raises `UserError` for a target without a config,
    and for heads that do not fit it.
    """
    sizes = shape_of(method, run)
    work = sizes.training_operations(1.0)
    if run.features.live:
        work += FORWARD * sizes.active_params
    target = ConfigOnly(config_at(run.target.path, run.target.trust_remote_code))
    drafter = outlined(method, run, target).drafter
    division = divided(run, 1)
    positions = division.rows * division.passes * run.data.max_length
    spent = optimiser_operations(drafter, run.optim.optimizer == "muon")
    return spent / (spent + work * positions)


def optimiser_operations(drafter: nn.Module, muon: bool) -> float:
    """Return the operations of an optimiser's step; those of AdamW by its time (`ADAMW`).

    Muon's iteration multiplies a matrix of n x m, n the smaller side, with its transpose, the
    product with itself and with the matrix (`muon.orthogonal`).
    """
    spent = ADAMW * sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    for matrix in hidden_matrices(drafter) if muon else []:
        n, m = sorted(matrix.shape)
        spent += NEWTON_SCHULZ * (4 * n * n * m + 2 * n**3)
    return spent
