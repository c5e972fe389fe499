# MiB that may travel to the device machine: what git tracks of this repository, and the pack of vLLM.
CHECKOUT_MIB=25
PACK_MIB=36
