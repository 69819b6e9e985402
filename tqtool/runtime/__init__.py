"""The C runtime and its Python binding: the same operations as `codec.reference`, the same bits, much faster."""
