"""What `python -m benchmarks` refuses before any work, in one line."""

import sys
from pathlib import Path

import pytest

from commands import Fails

SIZES = {
    "soak": "--prompt 80 --tokens 40",
    "growth": "--context 300 --budget 64 --head-dim 8 --rounds 2",
    "kernels": "--budget 2048",
    "serve": "--clients 2 --context 64,32 --policy quest --device cpu",
    "agent": "--start 64 --end 256 --turns 3 --answers 4,16 --policy quest --device cpu",
}
REFUSED = {
    "soak": {
        "--tokens 1600": "1680 tokens, prompt and decoded: the model has 1600 positions",
        "--policy tidal:rectify=4:verify": "nothing to verify",
        "--dtype int8": "int8",
        "--json /nowhere/soak.json": "cannot be written",
        "--picture /nowhere/soak.svg": "cannot be written",
        "--block 0": "greater than or equal to 1",
    },
    "growth": {
        "--selector cap64,b-tree": "unknown selector 'b-tree'; valid: groups, cap64, sqrt, root, quest, exact",
        "--selector quest --budget 15": "budget=15",
        "--selector sqrt --budget 20": "budget=20",
        "--context 64": "within a budget of 64 nothing is chosen",
        "--dtype int8": "unknown dtype 'int8'; valid: float32, bfloat16, float16",
        "--json /nowhere/growth.json": "cannot be written",
    },
    "kernels": {
        "--operation dens": "unknown operation 'dens'; valid: dense,",
        "--implementation cuda": "unknown implementation 'cuda'",
        "--context 2048": "context 2048 is within the budget of 2048",
    },
    "serve": {
        "--clients 0": "clients '0' is not valid",
        "--context long": "context 'long' is not valid",
        "--shared 1": "shared=1.0 is not valid: a share of each prompt, from 0 to below 1",
        "--shared nan": "shared=nan is not valid",
        "--stream 0": "stream=0.0 is not valid: prompts a second, above 0",
        "--stream 0.5": "new-tokens=128 is not valid beside --stream: at least 1024",
        "--policy quest:page=48": "block=32 is no multiple of its page=48; pass --block 48",
        "--policy lychee_cluster": "reads text: shape 'smollm2-135m' has no tokenizer",
        "--tensor-parallel 2": "tensor-parallel=2 is not valid on a CPU",
        "--draft-rate 0.5": "draft-rate=0.5 is valid only beside drafts",
        "--batch 4": "No such option: --batch",
        "--max-model-len 4": "No such option: --max-model-len",
    },
    "agent": {
        "--conversations 0": "conversations '0' is not valid",
        "--turns 1": "'1' is not valid; whole numbers from 2",
        "--answers 16,4": "answers=16,4 is not valid: the shortest and the longest, such as 50,800",
        "--answers 4,8,16": "answers=4,8,16 is not valid",
        "--facts": "answers=4,16 is not valid with facts: of at least 8 tokens",
        "--facts --answers 8,9": "shape=smollm2-135m is not valid with facts: a folder with weights",
        "--facts --answers 8,9 --shape {}": "turn 1 of 3: 64 new tokens, 16 of them shared, are too few to",
        "--end 113": "end=113 has no room for 3 answers of up to 16 tokens behind 64 and for what is said between",
        "--shared 1": "shared=1.0 is not valid",
    },
}


@pytest.mark.parametrize("command", REFUSED)
def test_bad_input_is_one_line(fails: Fails, model_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(sys.modules["saccade.cli.bench"], "find_spec", lambda name: object())
    model = ("--model", model_folder) if command == "soak" else ()
    said = {
        given: fails(command, *model, *SIZES[command].split(), *given.format(model_folder).split())
        for given in REFUSED[command]
    }
    assert {given: line for given, line in said.items() if REFUSED[command][given] not in line} == {}
