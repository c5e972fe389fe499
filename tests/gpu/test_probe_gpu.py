"""Steps in a row of the probe, as a CUDA graph and one call after the other."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from saccade.adapters.hf.probe import KINDS, SHORT, TOLD, Passage, Probe
from saccade.adapters.hf.run import attached
from saccade.methods.policy import Policy


@pytest.mark.parametrize("spec", ["dense", "tidal:budget=64,reselect=3", "less_is_more:budget=64,reselect=3"])
def test_replays_say_what_calls_say(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; logits near 1 differ by what sums in another order do, and so do their divergences."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda().eval()
    texts = [torch.randint(128, (2 * SHORT + 3 * TOLD + more,)).tolist() for more in (40, 100, 300)]
    probe = Probe(model, [Passage(tuple(text), 1) for text in texts], attach=attached, walks=(1, 32))
    replays, replay = list[int](), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    found = probe.measure(Policy.from_spec(spec), walk=32)
    assert len(replays) >= 31
    monkeypatch.setattr(Probe, "_captured", lambda self, rows: False)
    wanted = probe.measure(Policy.from_spec(spec), walk=32)
    for one, other in zip(found, wanted, strict=True):
        for kind in KINDS:
            assert one[kind].divergence.tolist() == pytest.approx(other[kind].divergence.tolist(), abs=1e-4)
