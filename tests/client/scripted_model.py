"""A model repository whose `ensemble` answers as its messages tell it, without an engine.

It speaks the names of Trident's ensemble. The last user message (or the text) is the script: its
words come back one by one. Words that begin with `!` are orders.
"""

from pathlib import Path

_CONFIG = """
backend: "python"
max_batch_size: 1
model_transaction_policy { decoupled: true }
input [ %s ]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "sequence_index" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "num_output_tokens" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "num_cached_tokens" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "logprobs" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "sections" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "prompt_logprobs" data_type: TYPE_STRING dims: [ 1 ] }
]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

_INPUTS = {
    "text_input": "STRING",
    "messages": "STRING",
    "sampling_parameters": "STRING",
    "max_tokens": "INT32",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_num_cached_tokens": "BOOL",
    "timeout": "UINT64",
}

_MODEL = """
import json, logging, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

logging.basicConfig(
    level=logging.INFO,
    format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
    datefmt="%Y-%m-%d %H:%M:%S",
)
log = logging.getLogger("trident.engine")
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        log.info("loading the script with %s", sys.executable)
        loaded = time.monotonic() + float(os.environ.get("SCRIPT_LOAD_S", "0"))
        while time.monotonic() < loaded:  # logs to its last moment
            log.info("still loading")
            time.sleep(0.001)
        if reason := os.environ.get("SCRIPT_FAIL"):
            raise pb_utils.TritonModelException(reason)
        log.info("ready: script, KV cache for 0 tokens, TRIDENT_MAX_NUM_SEQS=%s",
                 os.environ.get("TRIDENT_MAX_NUM_SEQS"))

    def execute(self, requests):
        for request in requests:
            arguments = (request, request.get_response_sender())
            threading.Thread(target=self.answer, args=arguments).start()

    def answer(self, request, sender):
        inputs = {t.name(): t.as_numpy().reshape(-1)[0] for t in request.inputs()}
        if "messages" in inputs:
            words = json.loads(inputs["messages"])[-1]["content"].split(" ")
        else:
            words = inputs["text_input"].decode().split(" ")
        if words[0] == "!invalid":
            text = "max_tokens: is wrong [code=invalid_value param=max_tokens]"
            error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            return
        if words[0] == "!wait":
            time.sleep(float(words[1]))
        pause = float(os.environ.get("SCRIPT_PAUSE_S", "0.01"))
        chunks = [word if i == 0 else " " + word for i, word in enumerate(words)]
        if not inputs.get("stream", False):
            chunks = ["".join(chunks)]
        for number, chunk in enumerate(chunks, start=1):
            time.sleep(pause)
            if request.is_cancelled():
                log.info("cancelled after %d", number)
                sender.send(flags=FINAL)
                return
            last = number == len(chunks)
            values = {
                "text_output": np.array([[chunk.encode()]], dtype=object),
                "finish_reason": np.array([[b"stop" if last else b"None"]], dtype=object),
                "sequence_index": np.array([[0]], dtype=np.int32),
                "num_input_tokens": np.array([[len(words)]], dtype=np.int32),
                "num_output_tokens": np.array([[len(chunk.split())]], dtype=np.int32),
            }
            tensors = [pb_utils.Tensor(name, value) for name, value in values.items()]
            sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
"""


def write_repository(folder: Path) -> Path:
    """Write the repository into `folder` and return it."""
    inputs = ", ".join(
        f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ 1 ] optional: true }}'
        for name, kind in _INPUTS.items()
    )
    version = folder / "ensemble" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG % inputs)
    (version / "model.py").write_text(_MODEL)
    return folder
