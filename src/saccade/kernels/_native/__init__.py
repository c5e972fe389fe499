"""The C implementation of decoding attention on CPU: built at install when a compiler is there, loaded by ctypes."""
