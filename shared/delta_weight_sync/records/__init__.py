"""The records of a run in its bucket: versions, manifests, HEAD, and their keys.

A run is a folder of the bucket (docs/wire-format.md). An anchor is a whole checkpoint. A delta leads from one
version to the next, and a jump is a delta over several versions. Every object is written once, except HEADs.
A HEAD names a manifest by sha256, and the manifest names every file by sha256. The HEAD of the last writer
counts (see `Writer`). If that HEAD is truncated, missing, stale or copied from another writer, readers find
the newest version by listing the manifests.
"""

from delta_weight_sync.records.fields import KEY as KEY
from delta_weight_sync.records.fields import Count as Count
from delta_weight_sync.records.fields import Digest as Digest
from delta_weight_sync.records.fields import Line as Line
from delta_weight_sync.records.fields import Number as Number
from delta_weight_sync.records.fields import Record as Record
from delta_weight_sync.records.fields import Text as Text
from delta_weight_sync.records.fields import Time as Time
from delta_weight_sync.records.fields import Word as Word
from delta_weight_sync.records.fields import cut as cut
from delta_weight_sync.records.files import AnchorRef as AnchorRef
from delta_weight_sync.records.files import DeltaRef as DeltaRef
from delta_weight_sync.records.files import FileRef as FileRef
from delta_weight_sync.records.files import joined as joined
from delta_weight_sync.records.files import part_suffix as part_suffix
from delta_weight_sync.records.files import sha256_together as sha256_together
from delta_weight_sync.records.keys import RUN_NAME as RUN_NAME
from delta_weight_sync.records.keys import TAG_NAME as TAG_NAME
from delta_weight_sync.records.keys import Keys as Keys
from delta_weight_sync.records.keys import LogKey as LogKey
from delta_weight_sync.records.keys import VersionKey as VersionKey
from delta_weight_sync.records.keys import Writer as Writer
from delta_weight_sync.records.keys import head_writer as head_writer
from delta_weight_sync.records.keys import log_key as log_key
from delta_weight_sync.records.keys import state_version as state_version
from delta_weight_sync.records.keys import tag_name as tag_name
from delta_weight_sync.records.keys import version_key as version_key
from delta_weight_sync.records.limits import ANCHOR_PAYS as ANCHOR_PAYS
from delta_weight_sync.records.limits import HEAD_BYTES as HEAD_BYTES
from delta_weight_sync.records.limits import LARGEST as LARGEST
from delta_weight_sync.records.limits import LOG_FLUSHES as LOG_FLUSHES
from delta_weight_sync.records.limits import MANIFEST_BYTES as MANIFEST_BYTES
from delta_weight_sync.records.limits import MAX_ASSETS as MAX_ASSETS
from delta_weight_sync.records.limits import MAX_FILES as MAX_FILES
from delta_weight_sync.records.limits import MAX_PARTS as MAX_PARTS
from delta_weight_sync.records.limits import MAX_REFS as MAX_REFS
from delta_weight_sync.records.limits import MAX_TAGS as MAX_TAGS
from delta_weight_sync.records.limits import POLL_S as POLL_S
from delta_weight_sync.records.limits import STRIDES as STRIDES
from delta_weight_sync.records.limits import TAG_BYTES as TAG_BYTES
from delta_weight_sync.records.limits import WINDOW as WINDOW
from delta_weight_sync.records.manifests import FORMAT as FORMAT
from delta_weight_sync.records.manifests import Head as Head
from delta_weight_sync.records.manifests import Manifest as Manifest
from delta_weight_sync.records.manifests import Rank as Rank
from delta_weight_sync.records.manifests import RunInfo as RunInfo
from delta_weight_sync.records.manifests import Sealed as Sealed
from delta_weight_sync.records.manifests import Tag as Tag
from delta_weight_sync.records.manifests import parse as parse
from delta_weight_sync.records.manifests import reference as reference
from delta_weight_sync.records.recipes import Recipe as Recipe
from delta_weight_sync.records.recipes import cheapest_recipe as cheapest_recipe
from delta_weight_sync.records.recipes import links_for as links_for
