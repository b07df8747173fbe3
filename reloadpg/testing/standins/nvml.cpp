// Stand-in for NVML (libnvidia-ml.so.1): the devices of the stand-in for CUDA, joined by NVLinks to
// four switches. NVIDIA's host code of NCCL looks its functions up by name.

#include <strings.h>

#include <cstdio>
#include <cstring>

#include "internal.h"

namespace {

enum { kSuccess = 0, kInvalid = 2, kNotSupported = 3, kNotFound = 6 };
constexpr unsigned kLinks = 18, kSwitches = 4, kLinkMegabytes = 26562;
enum { kFieldLinkSpeed = 90, kFieldLinkSpeedInfo = 164, kFieldLinkState = 165 };

int devices() {
  int count = 0;
  while (standin_physical_device(count) >= 0) count++;
  return count;
}
int number(void* device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }

struct PciInfo {
  char legacy_bus[16];
  unsigned domain, bus, device, pci_device, subsystem;
  char bus_id[32];
};
constexpr size_t kPciInfoBytes = 52;  // NVML's has 68; NCCL 2.30.7 declares 52 on its stack

struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  union {
    double real;
    unsigned number;
    unsigned long long wide;
  } value;
};

}  // namespace

EXPORT int nvmlInit() { return kSuccess; }
EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlShutdown() { return kSuccess; }
EXPORT const char* nvmlErrorString(int) { return "error of the stand-in for NVML"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = devices();
  return kSuccess;
}
EXPORT int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  if (standin_physical_device(index) < 0) return kInvalid;
  *device = reinterpret_cast<void*>(static_cast<intptr_t>(index) + 1);
  return kSuccess;
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char* id, void** device) {
  for (int index = 0; index < devices(); index++) {
    std::string own = standin::pci_bus_id(standin_physical_device(index));
    size_t length = strlen(id);
    if (length >= own.size() && !strcasecmp(own.c_str(), id + length - own.size()))
      return nvmlDeviceGetHandleByIndex(index, device);
  }
  return kNotFound;
}

EXPORT int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = number(device);
  return kSuccess;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return kSuccess;
}

EXPORT int nvmlDeviceGetNvLinkState(void*, unsigned link, int* active) {
  *active = link < kLinks;
  return kSuccess;
}

EXPORT int nvmlDeviceGetNvLinkCapability(void*, unsigned link, int, unsigned* result) {
  *result = link < kLinks;
  return kSuccess;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo(void*, unsigned link, PciInfo* info) {
  memset(info->legacy_bus, 0, sizeof info->legacy_bus);
  snprintf(info->legacy_bus, sizeof info->legacy_bus, "0000:%02x:00.0", 0xa0 + link % kSwitches);
  return kSuccess;
}

EXPORT int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = 0;
  return kSuccess;
}

EXPORT int nvmlDeviceGetFieldValues(void*, int count, FieldValue* values) {
  for (FieldValue* value = values; value < values + count; value++) {
    value->result = kSuccess;
    value->type = 1;
    switch (value->field) {
      case kFieldLinkState: value->value.number = value->scope < kLinks; break;
      case kFieldLinkSpeed:
      case kFieldLinkSpeedInfo: value->value.number = kLinkMegabytes; break;
      default: value->result = kNotSupported;
    }
  }
  return kSuccess;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
  memset(info, 0, kPciInfoBytes);
  std::string id = standin::pci_bus_id(standin_physical_device(number(device)));
  snprintf(info->legacy_bus, sizeof info->legacy_bus, "%s", id.c_str());
  sscanf(id.c_str(), "%x:%x:%x", &info->domain, &info->bus, &info->device);
  info->pci_device = 0x233010de;
  return kSuccess;
}

EXPORT int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* value) {
  *value = 5;
  return kSuccess;
}

EXPORT int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* value) {
  *value = 16;
  return kSuccess;
}

EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
EXPORT int nvmlDeviceGetPlatformInfo(void*, void*) { return kNotSupported; }

EXPORT int nvmlSystemGetConfComputeState(unsigned* state) {
  memset(state, 0, 12);
  return kSuccess;
}

EXPORT int nvmlSystemGetConfComputeSettings(unsigned* settings) {
  memset(settings + 1, 0, 16);
  return kSuccess;
}
