// Stand-in for the CUDA driver (libcuda.so.1): the few functions that torch links through
// libcaffe2_nvrtc.so and calls in every process. All others are stubs that return an error.
#include "internal.h"

EXPORT int cuInit(unsigned) { return 0; }

EXPORT int cuDriverGetVersion(int* version) {
  *version = CUDART_MAJOR * 1000;
  return 0;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return standin_physical_device(ordinal) < 0 ? cudaErrorInvalidDevice : cudaSuccess;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = standin_has_context(device);
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return 0;
}

EXPORT int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(1);
  return 0;
}

EXPORT int cuCtxSetCurrent(void*) { return 0; }

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "not supported by the stand-in for CUDA";
  return 0;
}
