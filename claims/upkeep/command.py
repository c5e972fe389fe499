"""`python -m claims upkeep`: what LycheeCluster's index still finds after thousands of decoded tokens."""

from typing import Annotated

from saccade.cli.options import Device, Dtype, JsonFile, Model, Picture, count, words

from .names import VARIANTS


def upkeep(
    model: Model = None,
    budget: Annotated[str, words("N,N", "Tokens of a set, the same for every policy.")] = "256",
    variants: Annotated[str, words("NAME,NAME", f"What is measured: {', '.join(VARIANTS)}.")] = ",".join(VARIANTS),
    prompt: Annotated[int, count("Tokens that are read at once first.")] = 1024,
    tokens: Annotated[int, count("Tokens that are decoded then.")] = 16_384,
    every: Annotated[int, count("Decoded tokens from one measurement to the next.")] = 512,
    queries: Annotated[int, count("Tokens whose queries a measurement takes.")] = 8,
    spacing: Annotated[int, count("One of so many tokens: neighbours would all meet a buffer equally full.")] = 17,
    texts: Annotated[int, count("Stretches of held-out text, none of which overlap.")] = 3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Annotated[int, count("CPU threads.", maximum=1024)] = 1,
    json: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Measure attention recall and token recall of an index against the decoded length, by how it is kept up.

    Every text is read densely once; its keys and the model's own queries are the same for all. Each index is then
    brought up token by token as in decoding: lazy (the paper's letter), replanted (the default), rebuilt (from nothing
    before every measurement; rebuilt-whole plants all chunks together), beside streaming and quest at the same budget.
    NAME/position and NAME/query take the chunks of a cluster in another order.

    Examples:

      python -m claims upkeep --budget 256,1024 --json upkeep.json --picture upkeep.svg

      python -m claims upkeep --variants lazy,replanted,streaming --tokens 4096 --texts 2
    """
    # Imported here, so that --help and a mistyped option do not wait for torch.
    import torch

    from lab.measuring import measure
    from saccade.cli.terminal import quiet_libraries

    from .job import UpkeepJob, UpkeepSettings
    from .report import difference_lines, upkeep_picture, upkeep_tables

    quiet_libraries()
    job = UpkeepJob.check(
        UpkeepSettings(
            model=model, budget=budget, variants=variants, prompt=prompt, tokens=tokens, every=every, queries=queries,
            spacing=spacing, texts=texts, device=device, dtype=dtype, threads=threads,
        )
    )  # fmt: skip
    torch.set_num_threads(threads)
    files = (json, picture)
    measure(job.experiment, job.results, files, upkeep_tables, upkeep_picture, lines=difference_lines, indent=None)
