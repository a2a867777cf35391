"""The delta codec: old bits + new bits -> delta file -> patches; exact for every bf16 bit pattern.

Most changes of an RL step move a weight by one unit in the last place (ULP), and the smaller a weight is, the
likelier it moves. Encoding `fast` stores the distance from each change to the next: 1.25 bytes per change if
1 % of the weights changed. `small` also uses the magnitudes of the old weights, which the reader has: 0.89
bytes. `Delta` reads both encodings.
"""

from delta_weight_sync.codec._file import Delta as Delta
from delta_weight_sync.codec._file import Encoding as Encoding
from delta_weight_sync.codec._file import TensorRow as TensorRow
from delta_weight_sync.codec._file import encode as encode
from delta_weight_sync.codec._file import header_size as header_size
from delta_weight_sync.codec._file import merged as merged
from delta_weight_sync.codec._patch import ULP_CLASSES as ULP_CLASSES
from delta_weight_sync.codec._patch import Bits as Bits
from delta_weight_sync.codec._patch import Index as Index
from delta_weight_sync.codec._patch import Patch as Patch
from delta_weight_sync.codec._patch import apply as apply
from delta_weight_sync.codec._patch import compare as compare
from delta_weight_sync.codec._patch import count_ulps as count_ulps
from delta_weight_sync.codec._patch import diff as diff
from delta_weight_sync.codec._patch import diff_flat as diff_flat
from delta_weight_sync.codec._patch import inverse as inverse
from delta_weight_sync.codec._patch import join as join
from delta_weight_sync.codec._patch import merge as merge
from delta_weight_sync.codec._patch import nearest as nearest
from delta_weight_sync.codec.groups import Decoded as Decoded
