"""Reads tritonserver's log: the engine's lines, and why a start failed."""

import json
import re
import signal
import time
from dataclasses import dataclass
from typing import Literal

_TRITON = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ([\w.]+):\d+\] ?(.*)", re.DOTALL)
# Lines of our models, from Python's logging with log_format=text.
_TRIDENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ ([A-Z])[A-Z]+ (trident[\w.]*): (.*)")
_LAUNCHER = "trident.launch"
_JSON_START = '{"ts":'  # the same with log_format=json

# The last line of a process that ends itself by SIGABRT.
_LAST_WORDS = (
    r"terminate called after throwing an instance of '[^']+'",
    r"ASSERTION FAILED: .+",
    r"(?:malloc|free|realloc)\(\): .+|double free or corruption.*|corrupted .+",
)

_CRASHES = tuple(f"Signal ({number:d}) received." for number in (signal.SIGABRT, signal.SIGSEGV))

# Messages on every machine without a GPU or NVIDIA's tools; tritonserver has no flag for them all.
_HARMLESS = (
    "CudaDriverHelper has not been",
    "CUDA driver version is insufficient",
    "NVML",
    "DCGM",
    "no pinned memory pool",
)

# Hints for reasons whose text does not name a remedy.
_HINTS = (
    (r"leave it out", ""),  # it does
    (r"unrecognized option", "see trident serve --help, and tritonserver --help for its flags"),
    (r"address already in use", "choose other ports: --http-port, --grpc-port, --metrics-port"),
    (
        r"\bmemory\b",
        "make it smaller: --max-model-len, --max-num-seqs, --kv-cache-memory-bytes or --dtype",
    ),
    (
        r"checkpoint|safetensors|config\.json|tokenizer|\bhub\b",
        "--model takes a folder in Hugging Face format (config.json, tokenizer.json, "
        "*.safetensors), a .gguf file or a hub id",
    ),
    (r"error while loading shared", "a library that tritonserver needs is missing; install it"),
)


@dataclass(frozen=True)
class LogLine:
    """One line of the log.

    Attributes:
        severity: first letter of the level; empty for output that came through no logger.
        source: the file of tritonserver, or the logger of ours, that it comes from.
        text: the message without quotes.
    """

    severity: str
    source: str
    text: str

    @property
    def from_engine(self) -> bool:
        """Whether it comes from Trident itself."""
        return self.source.startswith("trident") and bool(self.text)

    @property
    def is_harmless(self) -> bool:
        """Whether it complains of a GPU or of a tool of NVIDIA's that is not there."""
        return any(words in self.text for words in _HARMLESS)

    @property
    def is_problem(self) -> bool:
        """Whether a user should see it: a warning or an error that means something here."""
        return self.severity in ("W", "E", "F", "C") and not self.is_harmless


def parse(line: str) -> LogLine:
    """Split one raw line."""
    if line.startswith(_JSON_START):
        return _parse_json(line)
    if found := _TRIDENT.match(line):
        return LogLine(found[1], found[2], found[3].strip())
    found = _TRITON.match(line)
    if found is None:
        return LogLine("", "", line.strip())
    text = found[3].strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1].replace('\\"', '"').replace("\\n", "\n").strip()
    return LogLine(found[1], found[2], text)


def _parse_json(line: str) -> LogLine:
    """Split a line of ours with log_format=json; a traceback follows the message, as in text."""
    try:
        record = json.loads(line)
        fields = {name: str(value) for name, value in record["fields"].items()}
        exception = fields.pop("exception", "")
        words = [record["event"], *(f"{name}={value}" for name, value in fields.items())]
        text = "\n".join(filter(None, [" ".join(words), exception]))
        return LogLine(record["level"][0], record["logger"], text)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return LogLine("", "", line.strip())  # JSON of another source


def failure(log: str) -> tuple[str, str]:
    """Return why the server did not start or died, and what to do about it (may be empty)."""
    reason = _failure(log)
    # A process of ours that failed early left a traceback only: its last line is the reason.
    said = "\n".join(
        parse(each).text if each.startswith(_JSON_START) else each for each in log.splitlines()
    )
    exceptions = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): .+$", said, re.MULTILINE)
    if "its log says why" in reason and exceptions:
        reason = f"{reason}:\n{exceptions[-1]}"
    for pattern, hint in _HINTS:
        if re.search(pattern, reason, re.IGNORECASE):
            return reason, hint
    return reason, ""


def death(status: int, log: str) -> str:
    """Return how a server with this exit status died, and its last log line if that has the reason.

    Args:
        status: of the process; negative for a signal.
        log: what the server has said since its start.
    """
    how = f"ended with status {status}" if status >= 0 else f"was killed by {_signal(-status)}"
    for pattern in _LAST_WORDS:
        if found := re.findall(pattern, log):
            return f"tritonserver {how} ({found[-1]})"
    return f"tritonserver {how}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of real time
        return f"signal {number}"


def tells_of_success(line: str) -> bool:
    """Whether a raw line reports that a request was answered to its end."""
    return "trident.request" in line and "request finished" in line


def tells_of_crash(line: str) -> bool:
    """Whether a raw line is the first of what tritonserver writes when it crashes.

    With a corrupted heap it may hang there.
    """
    return line.strip() in _CRASHES


def launcher_line(text: str, level: str, log_format: Literal["text", "json"]) -> str:
    """Return a line of the launcher's own, in the form that the models' lines have."""
    now = time.time()
    if log_format == "json":
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        line = {"ts": f"{seconds}.{int(now % 1 * 1000):03d}Z", "level": level}
        return json.dumps(
            line | {"logger": _LAUNCHER, "event": text, "fields": {}}, separators=(",", ":")
        )
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{seconds}.{int(now % 1 * 1000):03d} {level} {_LAUNCHER}: {' '.join(text.split())}"


def _failure(log: str) -> str:
    lines = [parse(line) for line in log.splitlines()]
    problems = [line.text for line in lines if line.is_problem]
    # Several stages may fail for one reason, in the same words.
    if reasons := dict.fromkeys(_own_words(each) for each in problems if "failed to load" in each):
        return "\n".join(reasons)
    # What a server said that went on is not why this one ended: warnings, and lines of requests,
    # which quote their clients.
    lines = [line for line in lines if line.severity not in ("I", "W")]
    for pattern in (r"unrecognized option '[^']+'", r"error: (.+)", r"(error while loading .+)"):
        for line in lines:
            if found := re.search(pattern, line.text):
                return found[found.lastindex or 0]
    errors = [line.text for line in lines if line.is_problem]
    return "\n".join(errors[-3:]) or "tritonserver ended without an error message"


def _own_words(text: str) -> str:
    """Cut the model's own message out of `failed to load 'M' version 1: CODE: ... MESSAGE`."""
    message = text.split("\n\nAt:")[0]
    return re.sub(
        r"^failed to load '\w+' version \d+: [A-Z][\w ]*: (Triton\w*Exception: )?", "", message
    ).strip()
