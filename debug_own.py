import sys, tempfile, torch
from pathlib import Path
sys.path[:0] = ["tests", "tests/gpu/serving"]
from own_index import MODULE, NAMES
from own_method import installed
from cuda_engines import CudaEngines, Request, Truth, feed, distance, runner
import saccade
from saccade.text.levels import delimiter_levels
from transformers import AutoTokenizer
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.text import delimiter_table
tmp = Path(tempfile.mkdtemp())
R = Request("long", 0, 1500, 40)
with installed(tmp, MODULE, POSITIVE=NAMES[0], STOPS=NAMES[1]):
    for name in NAMES:
        engines = CudaEngines()
        engine = engines.make(f"{name}:budget=256")
        found = feed(engine, [R])
        truth = Truth()
        exact, ours = truth.logits(f"{name}:budget=256", R), truth.logits(f"{name}:budget=256", R, torch.float16)
        print(name, "vllm", distance(found["long"], exact), "hf16", distance(ours, exact), flush=True)
        per = (found["long"].log_softmax(-1) - exact.log_softmax(-1)).square().mean(-1).sqrt()
        print([round(float(x), 3) for x in per], flush=True)
        import gc
        gc.unfreeze()
        theirs = sys.modules["theirs"]
        for held in gc.get_objects():
            if isinstance(held, theirs.Scores) and held.held.shape[1] == 9:
                print("stops", held.stops, held.counts.tolist(), "placed", held.placed.tolist(), tuple(held.held.shape))
                slot = max(range(9), key=lambda s: held.stops[s])
                if name == NAMES[1]:
                    levels = delimiter_table(AutoTokenizer.from_pretrained(model_path()))
                    ids = R.ids
                    want = [p - 1e6 * (not 1 <= levels[i] <= 3) for p, i in enumerate(ids[: held.stops[slot]])]
                    got = held.held[0, slot, 0, : held.stops[slot]].tolist()
                    bad = [p for p, (a, b) in enumerate(zip(want, got)) if a != b]
                    print("bad", len(bad), bad[:20], [got[p] for p in bad[:5]], [want[p] for p in bad[:5]], "levels none", held.text.levels is None, type(held.text._kept))
                    print("stops among", sum(1 <= levels[i] <= 3 for i in ids))
        engines.close()
