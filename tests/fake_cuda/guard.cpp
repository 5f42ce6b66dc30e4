// A build of torch for CPUs has nothing that makes a CUDA device current. Tensors without memory
// need no more than this.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
