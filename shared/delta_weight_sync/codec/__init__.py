"""The delta codec encodes changed bf16 weights as a delta file, and decodes the file to the same bits.

Most changes of an RL step are one unit in the last place (ULP), and small weights change more often. Encoding
`fast` stores the distance from each change to the next. If 1 % of the weights changed, a change takes 1.25
bytes. Encoding `small` sorts the weights by their old magnitude into eight bands, and stores the changes of
each band separately. A change then takes 0.89 bytes, but the reader needs the old weights. `Delta` reads both
encodings.
"""

from delta_weight_sync.codec._file import Delta as Delta
from delta_weight_sync.codec._file import Encoding as Encoding
from delta_weight_sync.codec._file import TensorRow as TensorRow
from delta_weight_sync.codec._file import encode as encode
from delta_weight_sync.codec._file import header_size as header_size
from delta_weight_sync.codec._file import merged as merged
from delta_weight_sync.codec._patch import INFINITY as INFINITY
from delta_weight_sync.codec._patch import NAN as NAN
from delta_weight_sync.codec._patch import ULP_CLASSES as ULP_CLASSES
from delta_weight_sync.codec._patch import Bits as Bits
from delta_weight_sync.codec._patch import Index as Index
from delta_weight_sync.codec._patch import Patch as Patch
from delta_weight_sync.codec._patch import apply as apply
from delta_weight_sync.codec._patch import compare as compare
from delta_weight_sync.codec._patch import count_ulps as count_ulps
from delta_weight_sync.codec._patch import cut as cut
from delta_weight_sync.codec._patch import diff as diff
from delta_weight_sync.codec._patch import diff_flat as diff_flat
from delta_weight_sync.codec._patch import inverse as inverse
from delta_weight_sync.codec._patch import join as join
from delta_weight_sync.codec._patch import merge as merge
from delta_weight_sync.codec._patch import nearest as nearest
from delta_weight_sync.codec.groups import Decoded as Decoded
