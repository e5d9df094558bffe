"""`slipstream train data`: sequences made once, for several drafters."""

from slipstream.core.errors import UsageError
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.loading import ProgressBar, no_progress_bar
from slipstream.train.data import PACKED, Data
from slipstream.train.orders import make_writable
from slipstream.train.sequences import Sequences
from slipstream.train.settings import DataSettings


def pack_data(settings: DataSettings, progress_bar: ProgressBar = no_progress_bar) -> Sequences:
    """Write the sequences of `data` to the file `out`; what the target answers is kept beside it.

    Raises:
        UsageError: settings that contradict each other, or the data.
        CheckpointError: files that cannot be read.
    """
    out = settings.out
    if out.suffix != PACKED:
        raise UsageError(f"--out {out} must end in {PACKED}")
    packed = [path for path in settings.data if path.suffix == PACKED]
    if packed:
        raise UsageError(f"{packed[0]} is packed already; give it to `slipstream train KIND`")
    checkpoint = Checkpoint(resolve_checkpoint(settings.target, settings.revision))
    data = Data(settings, checkpoint, read_decoder_config(checkpoint).vocab_size)
    make_writable(out.parent, settings)
    return data.sequences(out, out.with_suffix(".answers.jsonl"), progress_bar)
