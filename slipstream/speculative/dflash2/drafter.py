"""`dflash2`: a draft block whose tokens are chosen in turn among the likeliest of each place."""

from functools import partial

from slipstream.speculative.dflash.chain import BlockChainDrafter
from slipstream.speculative.dflash2.config import DFlash2Checkpoint, read_dflash2_config
from slipstream.speculative.dflash2.network import DFlash2Network
from slipstream.speculative.heads.loading import load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys

HEAD = HeadMethod(
    name="dflash2",
    read=read_dflash2_config,
    network=partial(load_network, DFlash2Network),
    drafter=BlockChainDrafter,
    checkpoint=DFlash2Checkpoint,
    keys=ModelKeys(parallel=True, remedy="its layers run once for all tokens; leave it out"),
)
