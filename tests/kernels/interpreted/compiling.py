"""Compiles Triton kernels for a GPU that need not be there, in a process of its own without the interpreter.

Used as `compiled = compile_kernel("saccade.kernels.topk.triton", "_select", ...)`; the child imports the module anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel: its PTX, registers and bytes of local memory per thread."""

    ptx: str
    registers: int
    spilled: int


def compile_kernel(
    module: str,
    kernel: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: tuple[str, ...],
    *,
    capability: int,
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compile `module.kernel` for `sm_<capability>`.

    Args:
        signature: Triton's type of every parameter that is no constant, such as "*bf16", "*i32", "i32", "fp32".
        constants: values of the `tl.constexpr` parameters.
        divisible: parameters known to be multiples of 16, as pointers of whole tensors and most strides are.
    """
    job = {
        "module": module,
        "kernel": kernel,
        "signature": dict(signature),
        "constants": dict(constants),
        "divisible": list(divisible),
        "capability": capability,
        "warps": warps,
        "stages": stages,
    }
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job["module"]), job["kernel"])
    names = list(function.arg_names)
    types = {name: job["signature"].get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]}
    source = ASTSource(
        function, types, {(names.index(name),): job["constants"][name] for name in job["constants"]}, attributes
    )
    target = GPUTarget("cuda", job["capability"], 32)
    built = triton.compile(source, target=target, options={"num_warps": job["warps"], "num_stages": job["stages"]})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [str(tool), "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return {"ptx": built.asm["ptx"], "registers": registers, "spilled": stack + local}


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.stdin.read()))))  # noqa: T201
