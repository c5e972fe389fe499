"""What decides, head by head, between reading everything and reusing a set: parameters that training moves."""

from .concrete import HardConcrete as HardConcrete
from .direct import DirectGates as DirectGates
from .gate import Gates as Gates
from .kuma import HardKuma as HardKuma

KINDS: dict[str, type[HardKuma | DirectGates | HardConcrete]] = {
    kind.kind: kind for kind in (HardKuma, DirectGates, HardConcrete)
}
