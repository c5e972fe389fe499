"""Compiles Triton kernels for a GPU that need not be there, in a process of its own without the interpreter.

Used as `compiled = compile_kernel("saccade.kernels.topk.triton", "_select", ...)`; the child imports the module anew,
and stays for the next kernel: importing torch and Triton takes longer than most compilations.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel: its PTX, registers and bytes of local memory per thread."""

    ptx: str
    registers: int
    spilled: int


def pointers(signature: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, kind in signature.items() if kind.startswith("*"))


def signature_of(kernel: Any, kinds: Mapping[str, str], constants: Iterable[str] = ()) -> dict[str, str]:
    """Types of a kernel's parameters but for its constants: 32 bits and whole, unless `kinds` says otherwise."""
    return {name: kinds.get(name, "i32") for name in kernel.arg_names if not name.isupper() and name not in constants}


def expect_fit(compiled: Compiled, registers: int) -> None:
    """Nothing is spilled, and a thread has no more registers than these."""
    assert compiled.spilled == 0
    assert compiled.registers <= registers, compiled.registers


def compile_kernel(
    module: str, kernel: str, signature: Mapping[str, str], constants: Mapping[str, Any], divisible: tuple[str, ...], *,
    capability: int, warps: int = 4, stages: int = 3,
) -> Compiled:  # fmt: skip
    """Compile `module.kernel` for `sm_<capability>`.

    Args:
        signature: Triton's type of every parameter that is no constant, such as "*bf16", "*i32", "i32", "fp32".
        constants: values of the `tl.constexpr` parameters.
        divisible: parameters known to be multiples of 16, as pointers of whole tensors and most strides are.
    """
    job = {"module": module, "kernel": kernel, "signature": dict(signature), "constants": dict(constants)}
    job |= {"divisible": list(divisible), "capability": capability, "warps": warps, "stages": stages}
    compiler = _compiler()
    assert compiler.stdin is not None and compiler.stdout is not None
    compiler.stdin.write(f"{json.dumps(job)}\n")
    compiler.stdin.flush()
    line = compiler.stdout.readline()
    if not line:
        _compiler.cache_clear()
    assert line, f"the compiler died with {compiler.wait()} over {kernel} for sm_{capability}"
    answer = json.loads(line)
    assert "error" not in answer, answer["error"][-4000:]
    assert ".f64" not in answer["ptx"], f"{kernel} computes in float64, which no kernel asks for"
    return Compiled(**answer)


@cache
def _compiler() -> subprocess.Popen[str]:
    """Answers a job a line; it ends when this process does, and with it its standard input."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=environment)


def _answer() -> None:
    # Standard output is for answers alone, whatever compilers print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _compile(json.loads(line))
        except Exception:  # whatever a compiler raises, the test that asked fails
            answer = {"error": traceback.format_exc()}
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job["module"]), job["kernel"])
    names = list(function.arg_names)
    if "EARLY" in names:
        job["constants"]["EARLY"] = job["capability"] >= 90
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
    _answer()
