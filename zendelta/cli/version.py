"""What `zendelta --version` prints."""

from __future__ import annotations

import platform
from importlib import metadata

from zendelta import __version__


def version_lines() -> list[str]:
    """The versions of zendelta, Python and torch, and the device that `--device auto` would take.

    A CPU build of torch says so in its version. For any other build only torch itself knows whether there is a GPU
    that it can use, and it is imported: some seconds, here and nowhere else.
    """
    lines = [f"zendelta {__version__}", f"python   {platform.python_version()}"]
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return [*lines, "torch    not installed"]
    device = "cpu"
    if not torch_version.endswith("+cpu"):
        try:
            import torch

            torch_version = torch.__version__
            if torch.cuda.is_available():
                device = f"cuda ({torch.cuda.get_device_name(0)})"
        except Exception as error:  # whatever a broken installation raises; the version is worth printing all the same
            device = f"unknown (torch cannot be imported: {' '.join(str(error).split())})"
    return [*lines, f"torch    {torch_version}", f"device   {device}"]
