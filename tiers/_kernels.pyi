"""The C extension. Pointers are addresses as integers; nothing is checked here."""

def copy_pages(
    src: int,
    src_stride: int,
    src_ids: int,
    dst: int,
    dst_stride: int,
    dst_ids: int,
    num_pages: int,
    nbytes: int,
    /,
) -> None:
    """Copy the first `nbytes` of host page `src_ids[i]` onto page `dst_ids[i]`, for all i.

    Strides in bytes; ids are addresses of int32 arrays. The GIL is released.
    """

def build_info() -> dict[str, str]:
    """`compiler`, and `cuda_archs`: compute capabilities built for, "" where CUDA was left out."""
