"""Questions about stretches of installed packages' sources that share no token, on which nothing was found."""

from dataclasses import dataclass

import numpy

from lab.packages import Packages
from saccade.calibrate.problems import Corpus, NeedleProblems


@dataclass
class PackageProblems(NeedleProblems):
    """Of texts that share no token; there are fewer where the packages end. None begins before token `behind`."""

    behind: int = 0

    def read(self) -> Corpus:
        packages, longest = Packages(self.tokenizer), self.lengths[1]
        first = self.behind + int(numpy.random.default_rng(self.seed).integers(longest))
        starts = packages.stretches(longest, self.count, first)
        # As far apart as there is room.
        self.count = min(self.count, len(starts))
        self._starts = [starts[number * len(starts) // self.count] for number in range(self.count)]
        return packages

    def begin(self, number: int, length: int, rng: numpy.random.Generator) -> int:
        return self._starts[number]
