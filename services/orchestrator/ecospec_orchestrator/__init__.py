"""Serves completions from a mixture-of-experts model with cost-aware speculative decoding."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def _keep_compiled_kernels_by_source() -> None:
    """Name the folder of compiled kernels after the sources that they are made from, before numba is imported.

    numba looks at the file of a cached function alone: after a change in a file that this one calls, it would go on with the
    old machine code. NUMBA_CACHE_DIR, where it is set, is the folder that ours lies in.
    """
    package = Path(__file__).parent
    sources = sorted(file for file in package.rglob("*.py") if b"numba" in file.read_bytes())
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or package / "__pycache__")
    if not os.access(folder if folder.exists() else package, os.W_OK):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ecospec"
    if not folder.name.startswith("kernels-"):  # a child process inherits the variable
        os.environ["NUMBA_CACHE_DIR"] = str(folder / f"kernels-{digest}")


_keep_compiled_kernels_by_source()
# torch reads this once, when it first allocates: memory in large pages. Weights are read from end to end in every step, and looking
# up where each 4 KiB lies costs a few percent of that (less than the noise of one run on a shared machine).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
