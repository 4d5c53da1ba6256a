"""Sets the environment of a benchmark when it is imported: one thread, nothing downloaded, no progress bars.

It must be imported before torch and transformers.
"""

import os
import sys
import warnings
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")
