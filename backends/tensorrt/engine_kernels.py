"""The attention kernels of a bundle, loaded into the device that is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.gpu_attention import AttentionShape
    from octavo.backends.gpu_attention.launch import LoadedAttention
    from octavo.backends.manifest import Manifest


class EngineKernels:
    """One for each kind of attention layer; CUDA must have been started."""

    def __init__(self, bundle: Path, manifest: Manifest, capability: str) -> None:
        files = dict(manifest.backend_data.get("kernels", {}))
        self._capability = capability
        self._loaded: dict[AttentionShape, LoadedAttention] = {}
        if not files:  # a drafter without attention
            return
        if capability not in files:
            raise BackendError(
                f"the engine has attention kernels for compute capability {', '.join(files)} and "
                f"this GPU has {capability}: build it again with --compute-capability {capability}"
            )
        from octavo.backends.gpu_attention.compiled import KernelImage
        from octavo.backends.gpu_attention.launch import LoadedAttention

        for file in files[capability]:
            image = KernelImage.from_bytes((bundle / file).read_bytes())
            self._loaded[image.shape] = LoadedAttention(image)

    def attention(self, shape: AttentionShape) -> LoadedAttention:
        if shape not in self._loaded:
            raise BackendError(
                f"the engine has no attention kernel for {shape} and compute capability "
                f"{self._capability}: build it again"
            )
        return self._loaded[shape]

    def close(self) -> None:
        while self._loaded:
            _, kernel = self._loaded.popitem()
            kernel.close()
