"""Another version of a library beside the environment of `make setup`: `beside.py transformers==5.24.0 -- pytest …`.

Makes `.lanes/NAME`, an environment of its own that holds the versions asked for with what they need and finds all else,
saccade too, in the environment that runs this script; then runs a module there. An environment is kept where every
version is told and this one is still what it was made beside.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(wanted: list[str], module: list[str]) -> int:
    folder = ROOT / ".lanes" / "-".join(sorted(wanted)).replace("==", "-")
    python, done = folder / "bin" / "python", folder / "done"
    # Searched last, links of editable packages included.
    outer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    if not all("==" in one for one in wanted) or not done.exists() or done.read_text(encoding="utf-8") != outer:
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
        asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        own = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        Path(own.strip(), "outer.pth").write_text(outer, encoding="utf-8")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "--no-compile", "--upgrade", *wanted], check=True)
        done.write_text(outer, encoding="utf-8")
    return subprocess.run([python, "-m", *module], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    split = sys.argv.index("--")
    os.environ["HF_HUB_OFFLINE"] = "1"
    raise SystemExit(main(sys.argv[1:split], sys.argv[split + 1 :]))
