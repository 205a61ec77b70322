"""What can be wrong with a patch. Every text names the patch, its target and what to do."""


class PatchError(Exception):
    """Base class; the engine turns it into exit code 2."""


class MissingTarget(PatchError):
    """The target's module, or the attribute in it, does not exist in this Megatron."""


class SignatureDrift(PatchError):
    """The target's signature, kind or defining module is not the recorded one: the patch cannot be right."""


class BodyDrift(PatchError):
    """The target's body is not the recorded one, and the user did not name the patch in --k3-allow-drift."""


class UnrecordedTarget(PatchError):
    """Nobody recorded a fingerprint for the target, so nothing can be compared."""


class DoubleReplace(PatchError):
    """Two patches want to replace the same target."""


class Overwritten(PatchError):
    """Somebody else rebound a target after the patch was applied."""
