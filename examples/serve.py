"""`saccade serve` on loopback, and the `openai` client, which streams an answer; needs vLLM and openai."""

import socket
import subprocess
import sys
import time
import urllib.request
from pydoc_data.topics import topics  # the language reference, which comes with every Python

from openai import OpenAI

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
url = f"http://127.0.0.1:{port}"

# Without --model it serves the bundled model, under the name "bundled"; any further option is vLLM's.
settings = {"policy": "tidal:reselect=7,budget=256", "port": port, "max-model-len": "4096"}
options = [part for name, value in settings.items() for part in (f"--{name}", value)]
log = open("server.log", "wb")  # noqa: SIM115  # open as long as the server writes
command = [sys.executable, "-m", "saccade", "serve", *options]
server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
try:
    print("the server starts; this takes a minute", flush=True)
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:  # not yet
            if server.poll() is not None:
                sys.exit(f"the server ended with status {server.returncode}; server.log says why")
            time.sleep(0.5)

    pages = "\n\n".join(topics.values())[:8_000]
    prompt = (
        f"{pages[:4_000]}\nThe code of the amber falcon is 4821.\n{pages[4_000:]}\n\n"
        "Question: What is the code of the amber falcon?\nAnswer: The code of the amber falcon is"
    )
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    for sparse in ("on", "off"):
        chunks = client.completions.create(
            model="bundled",
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            stop=".",
            stream=True,
            extra_body={"vllm_xargs": {"saccade": sparse}},
        )
        print(f"saccade {sparse}:", end="", flush=True)
        for chunk in chunks:
            print(chunk.choices[0].text, end="", flush=True)  # as it comes
        print()
finally:
    server.terminate()
    server.wait(60)
print(f"the server has ended with status {server.returncode}")
