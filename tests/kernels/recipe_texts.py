"""Each published recipe of linear layers, written in its parts."""

_TILES = "forward=deepseek_1x128{0}/deepseek_128x128{0} dgrad=deepseek_1x128{0}/deepseek_128x128{0}"
_TILES += " wgrad=deepseek_1x128{0}/deepseek_1x128{0}+of_forward"

WRITTEN_OUT = {
    "nvfp4": "forward=nvfp4/nvfp4_16x16 dgrad=nvfp4+stochastic/nvfp4_16x16 "
    "wgrad=nvfp4+stochastic+rotated16/nvfp4+rotated16 last_blocks=0.15",
    "nvfp4_no_rotation": "forward=nvfp4/nvfp4_16x16 dgrad=nvfp4+stochastic/nvfp4_16x16 "
    "wgrad=nvfp4+stochastic/nvfp4 last_blocks=0.15",
    "nvfp4_nearest": "forward=nvfp4/nvfp4_16x16 dgrad=nvfp4/nvfp4_16x16 wgrad=nvfp4+rotated16 "
    "last_blocks=0.15",
    "nvfp4_1d_weights": "forward=nvfp4 dgrad=nvfp4+stochastic/nvfp4 "
    "wgrad=nvfp4+stochastic+rotated16/nvfp4+rotated16 last_blocks=0.15",
    "mxfp8": "forward=mxfp8-rceil dgrad=mxfp8-rceil wgrad=mxfp8-rceil",
    "deepseek_v3": _TILES.format(""),
    "deepseek_v3_pow2": _TILES.format("-rceil"),
    "fp8_current": "forward=fp8_per_tensor dgrad=fp8_per_tensor-e5m2/fp8_per_tensor "
    "wgrad=fp8_per_tensor-e5m2/fp8_per_tensor",
    "fp8_delayed": "forward=delayed-e4m3 dgrad=delayed-e5m2/delayed-e4m3 "
    "wgrad=delayed-e5m2/delayed-e4m3",
}
"""By name, in the spelling that a config keeps."""
