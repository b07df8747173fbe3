// What NVIDIA's host code of NCCL uses of CUDA and torch does not: documented functions of the
// driver, and a few of the runtime. Used by jobs with RELOADPG_NCCL only.
//
// An allocation of cuMemCreate is a file of the job's folder, so that processes can share it, and is
// counted as memory of its device. Kernels are not run.

#include <fcntl.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "internal.h"

EXPORT cudaError_t cudaGetDevice(int* device);
EXPORT cudaError_t cudaSetDevice(int device);
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
EXPORT cudaError_t cudaMalloc(void** pointer, size_t size);
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, int, cudaStream_t);

namespace {

using Lock = std::lock_guard<std::mutex>;
constexpr size_t kDeviceUnit = 2 << 20, kHostUnit = 4096;

// What cuMemCreate, cuMulticastCreate or an import gives. The mapping lets an importer keep the
// memory without a descriptor; only the creator has a path.
struct Allocation {
  char* mapping = nullptr;
  size_t size = 0;
  std::string path;
  bool counted = false;
  int references = 1;
  CUmemAllocationProp properties{};

  bool on_device() const { return properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE; }
};

std::mutex g_mutex;  // protects the following
std::map<char*, std::pair<size_t, Allocation*>> g_ranges;
std::map<char*, size_t> g_reservations;

Allocation* allocation(uint64_t handle) { return reinterpret_cast<Allocation*>(handle); }

void release(Allocation* it) {  // with g_mutex
  if (--it->references > 0) return;
  munmap(it->mapping, it->size);
  if (!it->path.empty()) unlink(it->path.c_str());
  if (it->counted && it->on_device()) standin_take(it->properties.location.id, -long(it->size));
  if (it->counted && !it->on_device()) standin_pin(-long(it->size));
  delete it;
}

bool map_file(Allocation* it, int file) {
  void* memory = mmap(nullptr, it->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  it->mapping = static_cast<char*>(memory);
  return memory != MAP_FAILED;
}

// The name of the file tells an importer where the memory is: memory-TYPE.DEVICE-XXXXXX.
int create_allocation(uint64_t* handle, size_t size, CUmemAllocationProp properties, bool counted) {
  auto it = new Allocation;
  it->size = size;
  it->properties = properties;
  bool device = it->on_device();
  if (counted && device && !standin_take(properties.location.id, size)) {
    delete it;
    return cudaErrorMemoryAllocation;
  }
  it->path = std::string(standin_job()) + "/memory-" + std::to_string(properties.location.type) +
             "." + std::to_string(properties.location.id) + "-XXXXXX";
  int file = mkostemp(&it->path[0], O_CLOEXEC);
  bool created = file >= 0 && ftruncate(file, size) == 0 && map_file(it, file);
  if (file >= 0) close(file);
  if (!created) {
    if (counted && device) standin_take(properties.location.id, -long(size));
    unlink(it->path.c_str());
    delete it;
    return cudaErrorMemoryAllocation;
  }
  it->counted = counted;
  if (counted && !device) standin_pin(size);
  *handle = reinterpret_cast<uint64_t>(it);
  return 0;
}

// ---- functions of the driver ----

int device_get(int* device, int ordinal) {
  *device = ordinal;
  return standin_physical_device(ordinal) < 0 ? cudaErrorInvalidDevice : 0;
}

int device_attribute(int* value, int attribute, int device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; return 0;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = standin::number("NVLS", 0); return 0;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = 0; return 0;
  }
  *value = 0;  // GPUDirect RDMA, DMA-BUF and fabric handles too
  cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
  return 0;
}

int device_uuid(unsigned char* uuid, int device) {
  memset(uuid, 0x10 + standin_physical_device(device), 16);
  return 0;
}

int error_text(int error, const char** text) {
  static thread_local char buffer[64];
  snprintf(buffer, sizeof buffer, "error %d of the stand-in for CUDA", error);
  *text = buffer;
  return 0;
}

int context_current(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return 0;
}

int context_set(void* context) {
  auto device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return context ? cudaSetDevice(device) : cudaSuccess;
}

int context_create(void** context, void*, int, unsigned, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return cudaSetDevice(device);
}

int context_device(int* device) { return cudaGetDevice(device); }
int does_nothing() { return 0; }  // also: launches of kernels

int memory_unit(size_t* unit, const CUmemAllocationProp* properties, int) {
  bool device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  *unit = device ? kDeviceUnit : kHostUnit;
  return 0;
}

int memory_create(uint64_t* handle, size_t size, const CUmemAllocationProp* properties, uint64_t) {
  if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return cudaErrorNotSupported;
  size_t unit;
  memory_unit(&unit, properties, 0);
  if (!size || size % unit) return cudaErrorInvalidValue;
  return create_allocation(handle, size, *properties, true);
}

int memory_release(uint64_t handle) {
  Lock lock(g_mutex);
  release(allocation(handle));
  return 0;
}

int memory_reserve(uint64_t* pointer, size_t size, size_t alignment, uint64_t, uint64_t) {
  alignment = std::max(alignment, kDeviceUnit);
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* area = mmap(nullptr, size + alignment, PROT_NONE, flags, -1, 0);
  if (area == MAP_FAILED) return cudaErrorMemoryAllocation;
  auto start = static_cast<char*>(area);
  auto base = reinterpret_cast<char*>((reinterpret_cast<size_t>(area) + alignment - 1) / alignment *
                                      alignment);
  if (base > start) munmap(start, base - start);
  munmap(base + size, start + alignment - base);
  *pointer = reinterpret_cast<uint64_t>(base);
  Lock lock(g_mutex);
  g_reservations[base] = size;
  return 0;
}

int memory_free_reservation(uint64_t pointer, size_t size) {
  Lock lock(g_mutex);
  auto found = g_reservations.find(reinterpret_cast<char*>(pointer));
  if (found == g_reservations.end() || found->second != size) return cudaErrorInvalidValue;
  munmap(found->first, size);
  g_reservations.erase(found);
  return 0;
}

int memory_map(uint64_t pointer, size_t size, size_t offset, uint64_t handle, uint64_t) {
  Lock lock(g_mutex);
  Allocation* it = allocation(handle);
  auto at = reinterpret_cast<char*>(pointer);
  if (offset + size > it->size) return cudaErrorInvalidValue;
  // An old size of 0 makes a second mapping of the same pages.
  if (mremap(it->mapping + offset, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED)
    return cudaErrorInvalidValue;
  it->references++;
  g_ranges[at] = {size, it};
  bool device = it->on_device();
  standin_remember(at, size, device ? it->properties.location.id : 0, device);
  return 0;
}

int memory_unmap(uint64_t pointer, size_t size) {
  Lock lock(g_mutex);
  auto start = reinterpret_cast<char*>(pointer);
  auto found = g_ranges.lower_bound(start);
  if (found == g_ranges.end() || found->first >= start + size) return cudaErrorInvalidValue;
  while (found != g_ranges.end() && found->first < start + size) {
    standin_forget(found->first);
    release(found->second.second);
    found = g_ranges.erase(found);
  }
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(start, size, PROT_NONE, flags, -1, 0);
  return 0;
}

Allocation* mapped_at(const void* pointer) {  // with g_mutex
  auto at = static_cast<const char*>(pointer);
  auto after = g_ranges.upper_bound(const_cast<char*>(at));
  if (after == g_ranges.begin()) return nullptr;
  auto& [start, range] = *std::prev(after);
  return at < start + range.first ? range.second : nullptr;
}

int memory_retain(uint64_t* handle, void* pointer) {
  Lock lock(g_mutex);
  Allocation* it = mapped_at(pointer);
  if (!it) return cudaErrorInvalidValue;
  it->references++;
  *handle = reinterpret_cast<uint64_t>(it);
  return 0;
}

int memory_properties(CUmemAllocationProp* properties, uint64_t handle) {
  *properties = allocation(handle)->properties;
  return 0;
}

int memory_export(void* out, uint64_t handle, int type, uint64_t) {
  Allocation* it = allocation(handle);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || it->path.empty())
    return cudaErrorNotSupported;
  int file = open(it->path.c_str(), O_RDWR | O_CLOEXEC);
  *static_cast<int*>(out) = file;
  return file < 0 ? cudaErrorInvalidValue : 0;
}

int memory_import(uint64_t* handle, void* shared, int type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return cudaErrorNotSupported;
  auto file = static_cast<int>(reinterpret_cast<intptr_t>(shared));
  char name[4096] = "";
  std::string link = "/proc/self/fd/" + std::to_string(file);
  struct stat status;
  if (fstat(file, &status) || readlink(link.c_str(), name, sizeof name - 1) < 0)
    return cudaErrorInvalidValue;
  auto it = new Allocation;
  it->size = status.st_size;
  const char* where = strstr(name, "/memory-");
  CUmemLocation& location = it->properties.location;
  if (!where || sscanf(where, "/memory-%d.%d-", &location.type, &location.id) != 2 ||
      !map_file(it, file)) {
    delete it;
    return cudaErrorInvalidValue;
  }
  it->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  it->properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  *handle = reinterpret_cast<uint64_t>(it);
  return 0;
}

int memory_range(uint64_t* base, size_t* size, uint64_t pointer) {
  void* start;
  size_t bytes;
  int device;
  bool on_device;
  if (!standin_block(reinterpret_cast<void*>(pointer), &start, &bytes, &device, &on_device))
    return cudaErrorInvalidValue;
  if (base) *base = reinterpret_cast<uint64_t>(start);
  if (size) *size = bytes;
  return 0;
}

int pointer_attribute(void* value, int attribute, uint64_t pointer) {
  void* start;
  size_t bytes;
  int device;
  bool on_device;
  auto at = reinterpret_cast<void*>(pointer);
  if (!standin_block(at, &start, &bytes, &device, &on_device)) return cudaErrorInvalidValue;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<int*>(value) = on_device ? 2 : 1; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = device; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
      Lock lock(g_mutex);
      *static_cast<uint64_t*>(value) = mapped_at(at) != nullptr;
      break;
    }
    default: *static_cast<int*>(value) = 0;  // legacy IPC too
  }
  return 0;
}

int multicast_unit(size_t* unit, const void*, int) {
  *unit = kDeviceUnit;
  return 0;
}

int multicast_create(uint64_t* handle, const CUmulticastObjectProp* properties) {
  CUmemAllocationProp own{};  // devices bind memory to it; it has none
  own.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  own.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return create_allocation(handle, properties->size, own, false);
}

const std::map<std::string, void*>& functions() {
  static const auto& all = *new std::map<std::string, void*>{
      {"cuDeviceGet", (void*)device_get},
      {"cuDeviceGetAttribute", (void*)device_attribute},
      {"cuDeviceGetUuid", (void*)device_uuid},
      {"cuGetErrorString", (void*)error_text},
      {"cuGetErrorName", (void*)error_text},
      {"cuCtxCreate", (void*)context_create},
      {"cuCtxDestroy", (void*)does_nothing},
      {"cuCtxGetCurrent", (void*)context_current},
      {"cuCtxSetCurrent", (void*)context_set},
      {"cuCtxGetDevice", (void*)context_device},
      {"cuLaunchKernel", (void*)does_nothing},
      {"cuLaunchKernelEx", (void*)does_nothing},
      {"cuMemGetAllocationGranularity", (void*)memory_unit},
      {"cuMemCreate", (void*)memory_create},
      {"cuMemRelease", (void*)memory_release},
      {"cuMemAddressReserve", (void*)memory_reserve},
      {"cuMemAddressFree", (void*)memory_free_reservation},
      {"cuMemMap", (void*)memory_map},
      {"cuMemUnmap", (void*)memory_unmap},
      {"cuMemSetAccess", (void*)does_nothing},
      {"cuMemRetainAllocationHandle", (void*)memory_retain},
      {"cuMemGetAllocationPropertiesFromHandle", (void*)memory_properties},
      {"cuMemExportToShareableHandle", (void*)memory_export},
      {"cuMemImportFromShareableHandle", (void*)memory_import},
      {"cuMemGetAddressRange", (void*)memory_range},
      {"cuPointerGetAttribute", (void*)pointer_attribute},
      {"cuMulticastGetGranularity", (void*)multicast_unit},
      {"cuMulticastCreate", (void*)multicast_create},
      {"cuMulticastAddDevice", (void*)does_nothing},
      {"cuMulticastBindMem", (void*)does_nothing},
      {"cuMulticastBindAddr", (void*)does_nothing},
      {"cuMulticastUnbind", (void*)does_nothing},
  };
  return all;
}

}  // namespace

EXPORT void* standin_driver_function(const char* name) {  // null: torch's behavior is unchanged
  static const bool wanted = standin::nvidias_nccl() != nullptr;
  auto found = functions().find(name);
  return wanted && found != functions().end() ? found->second : nullptr;
}

// ---- functions of the runtime ----

EXPORT cudaError_t cudaDeviceSetLimit(int, size_t) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  for (int index = 0; standin_physical_device(index) >= 0; index++)
    if (!strcasecmp(id, standin::pci_bus_id(standin_physical_device(index)).c_str())) {
      *device = index;
      return cudaSuccess;
    }
  return cudaErrorInvalidDevice;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** pointer, void* host, unsigned) {
  *pointer = host;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetFuncBySymbol(void** function, const void* symbol) {
  *function = const_cast<void*>(symbol);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolCreate(void** pool, const void*) {
  static char any;
  *pool = &any;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolDestroy(void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAttribute(void*, int, void*) { return cudaSuccess; }

EXPORT cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t size, void*, cudaStream_t) {
  return cudaMalloc(pointer, size);
}

EXPORT cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                        const size_t* sizes, size_t count, void*, size_t*, size_t,
                                        cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t k = 0; k < count && !error; k++)
    error = cudaMemcpyAsync(to[k], from[k], sizes[k], 0, stream);
  return error;
}

// A collective in a captured graph is not passed to NVIDIA's host code.
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t, void**, const void*, size_t, unsigned) {
  return cudaErrorNotSupported;
}
EXPORT cudaError_t cudaGraphAddDependencies(
    cudaGraph_t, const void*, const void*, const void*, size_t) {
  return cudaErrorNotSupported;
}
EXPORT cudaError_t cudaGraphAddEventRecordNode(
    void**, cudaGraph_t, const void*, size_t, cudaEvent_t) {
  return cudaErrorNotSupported;
}
