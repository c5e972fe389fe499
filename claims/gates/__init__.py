"""The fair trial of HardKuma gates: the paper's multiplier, three that know the size of the loss, and direct gates."""
