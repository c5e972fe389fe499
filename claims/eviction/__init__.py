"""Choosing tokens at every step against throwing them away: saccade's policies beside NVIDIA kvpress's presses.

What is fair. Written before the run whose figures are published, but for two points that came when part of it had been
seen: saccade's `query_aware` rows, and the sentence on calibration.

- **The same prompts, as token ids.** saccade writes them, kvpress reads them: neither side's template, separator or
  tokenizer has a say. Both answer greedily, in float32, without sampling, to `max_new_tokens` or the end-of-sequence
  token, and both answers are judged here, by the demo's own rule.
- **Dense attention is compared first**, token by token: where the two environments (kvpress needs an older
  transformers) disagree without any method, no difference between methods means anything.
- **A budget is a number of tokens per layer and KV head.** For a press that takes a ratio it is 1 - budget / length,
  prompt by prompt; what was kept is counted, not supposed. A press keeps the question and the answer on top of its
  budget (22 tokens and more), as kvpress does. saccade's budget holds all that a step attends to, but several policies
  attend to everything in some layers or heads. So the column `read` says for both sides what an answer token attends
  to, mean over layers and KV heads: rows of like `read` are the fair pairs, not rows of like budget.
- **What is saved differs.** Eviction frees memory; saccade keeps the whole cache and saves only reading. Nothing here
  weighs one against the other.
- **When the question is known** decides, so it is a column (`protocol`):
  - `context`: kvpress's convention. The context is compressed before anybody has seen the question. One compressed
    cache could serve all questions.
  - `query_aware`: kvpress's option of that name. Context and question are compressed together, the answer's beginning
    follows. A cache then serves one question, which is itself read densely. saccade's rows of this name: context and
    question dense, the answer's beginning and the answer decoded under the policy.
  - `decoding`: context dense; from the question's first token on, one token a step, under DecodingPress, or under
    saccade's policies, as on a server whose prompt was cached. DecodingPress's `compression_interval` is 1: with the
    default, 512, it would never compress within a question and a short answer.
  - `pipeline`: DecodingPress as kvpress's own pipeline runs it: the question goes through the model in one dense pass,
    the cache is compressed behind it. The first token of the answer is dense attention's: it flatters.
- **Options** are kvpress's defaults. SnapKV's window of 64 tokens fills budgets up to 64 and leaves nothing to choose,
  so SnapKV is run a second time with a window of a quarter of the budget, which at 256 is the default.
- **DuoAttention** has patterns for six published models only, and its scoring on the fly reads BookSum from a hub. The
  scoring is kvpress's own here, on other texts: 50 stretches of the language reference's training half. Its streaming
  heads keep 128 first and 256 recent tokens, which no option changes: it cannot meet the budgets. It is run at three
  shares of streaming heads, and `read` says where it stands.
- **The presses are kvpress's code**, called layer by layer behind one dense prefill instead of one prefill each:
  every press acts behind a layer's attention, so the prefill is the same for all. Whether that gives what kvpress's
  pipeline gives is compared, method by method, on a short prompt, and recorded.
- **Calibration favours saccade**: `tidal`, `less_is_more` and `lychee_decode` use the recipe beside the model, found on
  questions of this kind with other keys. No press was calibrated to the model, but for DuoAttention's scores.
- The model is the bundled one unless another is named: it was trained on this kind of question, and is small. Nothing
  here says how the methods rank on a published model.
"""
