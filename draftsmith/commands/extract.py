"""`draftsmith data extract`: run the target over the data of a training run and store its features.

There may be any number of workers, see `train/extraction.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..command_line.parse import config_with
from ..heads.errors import UserError
from ..inference.base.output_paths import check_output_folder
from ..train.data.config import StoreType
from ..train.methods.registry import RunFile, method_for, method_named

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..inference.targets.target import TargetSource
    from ..train.config import RunConfig


@dataclass
class ExtractOptions(RunFile):
    """Store the target's features for a training run, so that the run does not load the target.

    With many workers: accelerate launch -m draftsmith.train data extract --config FILE --out STORE.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data extract --config configs/eagle/quickstart.yaml --out "
        "runs/quickstart/store",
        "accelerate launch -m draftsmith.train data extract --config run.yaml --out STORE",
    )

    out: str
    """Folder of the feature store."""
    dtype: StoreType = "bfloat16"
    """Type of the stored features: float32, bfloat16, or fp8 (e4m3 with a scale for each position,
    which takes half of bfloat16)."""
    rows_per_shard: int = 64
    """Number of packed rows in a shard."""
    ring: int | None = None
    """Largest number of shards that are kept: those that the training needs next."""

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1 or (self.ring is not None and self.ring < 2):
            raise UserError(
                "rows_per_shard must be at least 1, ring at least 2: one shard is read while the "
                "next is written"
            )


def run(options: ExtractOptions) -> None:
    """Run the command. Raises `UserError` before the target is loaded where that is possible."""
    from accelerate import Accelerator

    from ..inference.targets.stored import StoreLayout
    from ..train.extraction import Extraction
    from ..train.loop import check_before_loading
    from ..train.losses.initialization import apply_init_from
    from ..train.parallel import PROCESS_GROUP, disable_zero3_loading, lock_output

    check_output_folder(options.out, "--out")
    name = method_for(options.config, options.method)
    method = method_named(name)
    # The run's own folder, which a config may leave open, is not written here.
    changes = [f"out={options.out}", *options.set]
    config = config_with(method.run_class, options.config, changes)
    # A run that trains from this store names it in its config, and it is only written here.
    # `features.server` stays: it says where the features come from.
    config.features.store = None
    check_before_loading(config, method)
    apply_init_from(config)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[PROCESS_GROUP])
    disable_zero3_loading(accelerator)
    with lock_output(options.out):
        target = target_for(config, options, accelerator)
        taps, all_last = method.features_of(config, target)
        layout = StoreLayout([*taps], all_last, options.dtype, options.rows_per_shard, options.ring)
        Extraction(Path(options.out), name, config, target, layout, accelerator).run()
    accelerator.end_training()


def target_for(
    config: RunConfig, options: ExtractOptions, accelerator: Accelerator
) -> TargetSource:
    """Load the run's target, or what is needed of it with a server. Raises `UserError`."""
    from ..inference.targets.target import load_target
    from ..train.loading import load_served_target, with_rank_device

    if config.features.server is not None:
        return load_served_target(config, accelerator)
    target = load_target(with_rank_device(config.target, accelerator))
    if target.together and options.ring is not None:
        raise UserError(
            f"a ring's workers go their own ways, target.spread={target.spread} needs them "
            "together; use devices"
        )
    return target
