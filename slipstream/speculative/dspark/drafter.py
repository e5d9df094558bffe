"""`dspark`: a draft block whose tokens are corrected in turn, with confidences of its own."""

from functools import partial

from slipstream.speculative.dflash.chain import BlockChainDrafter
from slipstream.speculative.dspark.config import read_dspark_config
from slipstream.speculative.dspark.network import DSparkNetwork
from slipstream.speculative.heads.loading import load_network
from slipstream.speculative.heads.method import HeadMethod
from slipstream.speculative.model_options import ModelKeys

HEAD = HeadMethod(
    name="dspark",
    read=read_dspark_config,
    network=partial(load_network, DSparkNetwork),
    drafter=BlockChainDrafter,
    keys=ModelKeys(parallel=True, remedy="its layers run once for all tokens; leave it out"),
)
