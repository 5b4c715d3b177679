"""What the engine imports when it starts: nothing that takes long and that it does not need."""

import subprocess
import sys


def test_the_compiler_of_torch_stays_out() -> None:
    """It takes a second or two, and operations on the meta device may import it unasked."""
    script = (
        "import sys; from engine.config.engine_config import EngineConfig; "
        "from engine.core.engine_core import EngineCore; "
        "EngineCore(EngineConfig(model='demo', device='cpu')); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
