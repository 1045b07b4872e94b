"""What this machine can do: which precisions run here, which only pretend to, and what follows for a run.

`autoprec doctor` prints it. torch is imported only when it is asked about, and a broken installation is a
finding here, not a traceback.
"""

from __future__ import annotations

import platform
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Literal

from autoprec import __version__
from autoprec.noun import Noun

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Check", "diagnose_machine", "environment"]

_NATIVE_BF16 = (8, 0)
"""Compute capability from which on a GPU of NVIDIA's multiplies bf16 itself; below, PyTorch emulates it in fp32."""
_MINIMUM = {"torch": (2, 6), "fastai": (2, 8, 9), "optuna": (4, 0)}
"""The lower bounds of the package's own requirements."""


class Check(Noun):
    """One thing looked at."""

    name: str
    status: Literal["ok", "limited", "broken"]
    """limited: works, with a restriction that `says` names; broken: autoprec cannot work here."""
    says: str
    """What was seen and what it means, for people."""


def diagnose_machine() -> tuple[Check, ...]:
    """Look at the machine. Takes the time of importing torch and fastai; changes nothing."""
    checks = [Check(name="python", status="ok", says=platform.python_version()), *(_package(name) for name in _MINIMUM)]
    if all(c.status != "broken" for c in checks if c.name == "torch"):
        checks += _devices()
    return tuple(checks)


def environment() -> dict[str, str]:
    """Versions, platform and device, as a run records them."""
    import torch

    found = {"autoprec": __version__, "python": platform.python_version(), "platform": platform.platform()}
    found |= {name: _version(name) for name in _MINIMUM}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() or "cpu"
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree that was put on the path by hand
        return "unknown"


def _package(name: str) -> Check:
    minimum = _MINIMUM[name]
    wanted = ".".join(map(str, minimum))
    try:
        import_module(name)
        version = metadata.version(name)
    except Exception as e:  # noqa: BLE001 - a broken extension module can raise anything, and that is the finding
        says = f"cannot be imported: {type(e).__name__}: {e}. Install {name}>={wanted}."
        return Check(name=name, status="broken", says=says)
    if _numbers(version) < minimum:
        return Check(name=name, status="broken", says=f"{version}; autoprec needs {wanted} or later")
    return Check(name=name, status="ok", says=version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 6) of `2.6.0a1+cu121` and the like."""
    parts = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _devices() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        yield from _cuda()
    else:
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but no GPU answers" if built else "torch is built without CUDA"
        says = f"none: {why}. A run that asks for 16 bits is made in fp32 here, unless emulate_cuda=True."
        yield Check(name="cuda", status="limited", says=says)
    yield _emulation()


def _cuda() -> Iterator[Check]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    device = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {memory:.0f} GiB"
    yield Check(name="cuda", status="ok", says=f"{device}, CUDA {torch.version.cuda}")
    if major < 7:
        says = "runs, but without tensor cores (capability 7.0): slower than fp32 for most models"
        yield Check(name="fp16", status="limited", says=says)
    else:
        yield Check(name="fp16", status="ok", says="native, with loss scaling")
    if torch.cuda.is_bf16_supported(including_emulation=False) and (major, minor) >= _NATIVE_BF16:
        yield Check(name="bf16", status="ok", says="native")
    else:
        says = "only emulated (native from capability 8.0): slower than fp32, so the remedy bf16 does not apply here"
        yield Check(name="bf16", status="limited", says=says)


def _emulation() -> Check:
    """Lay CUDA's lists over CPU autocast and see whether they bite: a product in half, a softmax in fp32."""
    import torch

    name = "cpu emulation"
    try:
        from autoprec.emulation import emulate_cuda

        with emulate_cuda(), torch.autocast("cpu", dtype=torch.float16):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            made = (product.dtype, torch.softmax(product, dim=0).dtype)
    except Exception as e:  # noqa: BLE001 - whatever a torch of another time raises here, emulation will not work
        return Check(name=name, status="limited", says=f"does not work with this torch: {type(e).__name__}: {e}")
    if made != (torch.float16, torch.float32):
        says = f"does not work with this torch: product and softmax are {made[0]} and {made[1]}"
        return Check(name=name, status="limited", says=says)
    says = "emulate_cuda=True runs CUDA's autocast lists in 16-bit arithmetic on the CPU: finds faults, saves no time"
    return Check(name=name, status="ok", says=says)
