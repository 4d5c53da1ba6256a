"""`trainer.precision`: the public, read-only view of a run."""

from typing import TypeVar

from ..boundaries.placement import BoundaryPlan
from ..core.coverage import SafetyContract
from ..core.errors import Problem
from ..core.feature import Feature, Run
from ..media.caster import MediaDecision
from ..media.inputs import MediaInputs
from ..model.inventory import ModelInventory
from ..numerics.activations import OverflowReport
from ..numerics.gradients import GradientReport
from ..numerics.not_finite import NotFinite
from ..numerics.overflow_probe import OverflowProbe
from ..numerics.trace import Cause
from ..policy.distributed import Engine
from ..policy.resolve import PrecisionPolicy
from ..policy.settings import PrecisionSettings
from ..report.document import Report
from ..report.reporter import Reporter
from ..rollout.alignment import RolloutAlignment
from ..weights.prepare import PreparedWeights


_FeatureT = TypeVar("_FeatureT", bound=Feature)


class Precision:
    """A read-only view of a run's precision.

    `trainer.precision[SomeFeature]` returns the run's instance of that feature class.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def settings(self) -> PrecisionSettings:
        """The precision settings."""
        return self._run.settings

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes of the run, each with the reason for it."""
        return self._run.policy

    @property
    def model(self) -> ModelInventory:
        """The inventory of the model: its parts, and the dtypes of their weights."""
        return self._run.inventory

    @property
    def weights(self) -> PreparedWeights:
        """The casts and other changes that were applied to the weights."""
        return self._run.weights

    @property
    def boundaries(self) -> BoundaryPlan:
        """The dtype boundaries that were placed in the model."""
        return self._run.boundaries

    @property
    def media(self) -> list[MediaDecision]:
        """The dtype of each media input, decided once on the first batch that contains it."""
        return self._run.feature(MediaInputs).decisions

    @property
    def engine(self) -> Engine:
        """The distributed engine (DDP, FSDP, DeepSpeed) and its dtypes."""
        return self._run.engine

    @property
    def sampler_dtype(self) -> str:
        """The dtype in which a separate sampler such as vLLM computes, for example `"float16"`."""
        return self._run.feature(RolloutAlignment).sampler_dtype

    @property
    def coverage(self) -> SafetyContract:
        """What the trainer class covers, and how often each hook has fired."""
        return self._run.coverage

    @property
    def overflow(self) -> OverflowReport | None:
        """The report of the last overflow probe; `None` before the first probe and in runs without float16."""
        return self._run.feature(OverflowProbe).report

    @property
    def gradients(self) -> GradientReport | None:
        """The gradients of module outputs in the first step of an fp16 run; `None` before it and in other runs."""
        return self._run.feature(NotFinite).gradients

    @property
    def not_finite(self) -> Cause | None:
        """The first number that was not finite in the last skipped step that was computed again; `None` if none."""
        return self._run.feature(NotFinite).cause

    @property
    def findings(self) -> tuple[Problem, ...]:
        """The causes that were found for faults during training, each with what to write, in order."""
        return tuple(self._run.findings)

    @property
    def report(self) -> Report:
        """The precision report: planned values until the first optimizer step, measured values after it."""
        return self._run.feature(Reporter).report

    def __getitem__(self, kind: type[_FeatureT]) -> _FeatureT:
        return self._run.feature(kind)

    def __str__(self) -> str:
        return f"{self.policy}\n{self.weights}\n{self.boundaries}"
