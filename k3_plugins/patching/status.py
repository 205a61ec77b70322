"""The verdict about one patch against the Megatron that is installed."""

from dataclasses import dataclass
from enum import Enum

from k3_plugins.patching.errors import BodyDrift, MissingTarget, PatchError, SignatureDrift, UnrecordedTarget
from k3_plugins.patching.patch import Patch


class PatchState(Enum):
    """OK, or what stands in the way."""

    OK = "OK"
    DRIFT_ALLOWED = "DRIFT (allowed)"
    BODY_DRIFT = "DRIFT (body)"
    SIGNATURE_DRIFT = "DRIFT (signature)"
    UNRECORDED = "UNRECORDED"
    MISSING = "MISSING"


_ERRORS: dict[PatchState, type[PatchError]] = {
    PatchState.BODY_DRIFT: BodyDrift,
    PatchState.SIGNATURE_DRIFT: SignatureDrift,
    PatchState.UNRECORDED: UnrecordedTarget,
    PatchState.MISSING: MissingTarget,
}


@dataclass(frozen=True)
class PatchStatus:
    """One line of the doctor's report."""

    patch: Patch
    state: PatchState
    message: str
    """What was found, and what to do."""
    diff: str = ""
    """Recorded against installed, in unified form; lines that are gone are counted, not quoted."""

    @property
    def fatal(self) -> bool:
        """True if the patch cannot be applied."""
        return self.state in _ERRORS

    def error(self) -> PatchError:
        """The exception for a fatal state."""
        return _ERRORS[self.state](self.message)
