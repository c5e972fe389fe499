"""Which packages the code model is trained on and which it never sees, in one place."""

STANDARD_LIBRARY = "python"
"""Stands for the standard library among the packages; one of its modules in ten is held out too."""

HELD_OUT = ("torch", "scipy", "matplotlib", "numpy", "transformers")
"""Whole packages that are in no training text: those that `saccade.eval.document.package_sources` reads.

So what the claims call "sources of installed packages" is held out of this model, as it is of the bundled one.
"""

TRAINING = (
    STANDARD_LIBRARY,
    # mathematics and data
    *(
        "sympy",
        "mpmath",
        "networkx",
        "sklearn",
        "pandas",
        "narwhals",
        "pyarrow",
        "joblib",
        "dateutil",
        "more_itertools",
    ),
    # languages and compilers
    *("mypy", "mypyc", "jedi", "parso", "griffe", "numba", "llvmlite", "triton", "pycparser", "cffi", "pyparsing"),
    *("lark", "jinja2", "attr", "dill", "tvm_ffi", "xgrammar", "executing"),
    # texts and documents
    *("nltk", "fontTools", "pygments", "markdown", "markdown_it", "mkdocs", "yaml", "sacrebleu", "lxml", "PIL"),
    *("rapidfuzz", "charset_normalizer", "nbformat", "material", "pytablewriter"),
    # networks and services
    *(
        "aiohttp",
        "tornado",
        "httpx",
        "httpcore",
        "requests",
        "urllib3",
        "websockets",
        "starlette",
        "fastapi",
        "uvicorn",
    ),
    *("dns", "mcp", "opentelemetry", "sentry_sdk", "grpc", "zmq", "prometheus_client", "anyio", "cryptography", "jwt"),
    *("supervisor", "watchdog", "psutil", "fsspec", "loguru", "model_hosting_container_standards"),
    # tools and terminals
    *("setuptools", "packaging", "pip", "virtualenv", "distlib", "build", "pre_commit", "platformdirs", "filelock"),
    *("_pytest", "hypothesis", "xdist", "execnet", "IPython", "ipykernel", "jupyter_client", "traitlets", "debugpy"),
    *("prompt_toolkit", "rich", "click", "typer", "tqdm", "pexpect", "portalocker", "absl", "pydantic", "jsonschema"),
    *("pydantic_settings", "pathspec", "fastjsonschema"),
    # machine learning
    *("vllm", "datasets", "evaluate", "huggingface_hub", "accelerate", "peft", "lm_eval", "compressed_tensors"),
    *("mistral_common", "einops"),
)
"""Whole packages of the training text, in its order."""

# Left out though they are installed: parts of held-out packages under another name (torchgen, functorch, mpl_toolkits);
# clients written by a generator (openai, anthropic, mcp_types); what is mostly tables (chardet, backrefs, pymdownx,
# wcwidth, idna, babel, regex); packages of less than about 60,000 characters, which are shorter
# than a window of the longest stage.
