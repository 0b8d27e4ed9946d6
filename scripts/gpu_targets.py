"""The cards that the GPU kernels are compiled for, as the compiler is told about them.

Numbers are public: NVIDIA's data sheets and the table of compute capabilities in the CUDA
programming guide. An RTX 4090 takes the code of the L4, an H200 that of the H100.
"""

import dataclasses

REGISTERS = 65536
"""Of 32 bits, on an SM (a core, to the compiler) and for a block, of every card here."""
WARP = 32
"""Threads of a warp."""
REGISTER_UNIT = 256
"""Registers are given out to a warp in multiples of so many."""
WARP_UNIT = 4
"""Warps of an SM share its registers in so many equal parts."""
SHARED_UNIT = 128
"""Shared memory is given out in multiples of so many bytes."""
SHARED_RESERVED = 1024
"""Bytes of shared memory that the system keeps for each block."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A card.

    Attributes:
        name: As it is called here.
        device: As its driver calls it.
        capability: Compute capability, major and minor.
        arch: What the PTX for it says it is for.
        cores: Streaming multiprocessors (SMs).
        shared_core_bytes: Shared memory of an SM.
        shared_block_bytes: Thereof a block's, at most.
        threads: Resident on an SM, at most.
        blocks: Resident on an SM, at most.
        float_units: For float32, on an SM.
        bandwidth: Of its memory, in bytes per second.
        l2_bytes: Second-level cache.
        clock_ghz: Boost clock, as text.
        memory_bytes: Device memory.
    """

    name: str
    device: str
    capability: tuple[int, int]
    arch: str
    cores: int
    shared_core_bytes: int
    shared_block_bytes: int
    threads: int
    blocks: int
    float_units: int
    bandwidth: int
    l2_bytes: int
    clock_ghz: str
    memory_bytes: int

    def config(self) -> str:
        """XLA's target config, a text-format protocol buffer; the rest of it has defaults."""
        major, minor = self.capability
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: {WARP}
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_core_bytes}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {self.float_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_block_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.device}"
"""

    def blocks_per_core(self, *, threads: int, registers: int, shared_bytes: int) -> int:
        """Occupancy: how many blocks of a kernel an SM holds at once.

        Args:
            threads: Of a block.
            registers: Of a thread.
            shared_bytes: Of a block.
        """
        warps = _up(threads, WARP) // WARP
        of_warp = _up(registers * WARP, REGISTER_UNIT)
        by_registers = REGISTERS // of_warp // WARP_UNIT * WARP_UNIT // warps
        by_shared = self.shared_core_bytes // (_up(shared_bytes, SHARED_UNIT) + SHARED_RESERVED)
        return min(self.blocks, self.threads // (warps * WARP), by_registers, by_shared)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


A100 = Target(
    name="a100",
    device="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    arch="sm_80",
    cores=108,
    shared_core_bytes=164 << 10,
    shared_block_bytes=163 << 10,
    threads=2048,
    blocks=32,
    float_units=64,
    bandwidth=2_039_000_000_000,
    l2_bytes=40 << 20,
    clock_ghz="1.41",
    memory_bytes=80 << 30,
)
L4 = Target(
    name="l4",
    device="NVIDIA L4",
    capability=(8, 9),
    arch="sm_89",
    cores=58,
    shared_core_bytes=100 << 10,
    shared_block_bytes=99 << 10,
    threads=1536,
    blocks=24,
    float_units=128,
    bandwidth=300_000_000_000,
    l2_bytes=48 << 20,
    clock_ghz="2.04",
    memory_bytes=24 << 30,
)
H100 = Target(
    name="h100",
    device="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    arch="sm_90a",
    cores=132,
    shared_core_bytes=228 << 10,
    shared_block_bytes=227 << 10,
    threads=2048,
    blocks=32,
    float_units=128,
    bandwidth=3_352_000_000_000,
    l2_bytes=50 << 20,
    clock_ghz="1.98",
    memory_bytes=80 << 30,
)

# Of the same generation as the L4.
RTX4090 = dataclasses.replace(
    L4,
    name="rtx4090",
    device="NVIDIA GeForce RTX 4090",
    cores=128,
    bandwidth=1_008_000_000_000,
    l2_bytes=72 << 20,
    clock_ghz="2.52",
)

TARGETS = {target.name: target for target in (A100, L4, H100)}
"""What single kernels are compiled for."""
STEP_TARGETS = {target.name: target for target in (H100, RTX4090)}
"""What whole steps are compiled for."""
