// What ONNX Runtime and Python see of the library. To add an op, list its kernel class in `kOps`.
#include "accept.h"
#include "cpu_features.h"
#include "custom_op.h"
#include "export.h"
#include "fused_paged_attention.h"
#include "linear.h"
#include "ort_abi.h"
#include "paged_attention.h"
#include "quantized_linear.h"
#include "rowwise.h"

#include <mutex>
#include <string>

namespace octavo {
namespace {

constexpr int kLibraryVersion = 1;

const CustomOpFor<Accept> kAccept;
const CustomOpFor<FusedPagedAttention> kFusedPagedAttention;
const CustomOpFor<FusedPagedAttentionInt8> kFusedPagedAttentionInt8;
const CustomOpFor<Linear> kLinear;
const CustomOpFor<PagedAttention> kPagedAttention;
const CustomOpFor<QuantizedLinear> kQuantizedLinear;
const CustomOpFor<Quantize> kQuantize;
const CustomOpFor<Norm> kNorm;
const CustomOpFor<NormQuantize> kNormQuantize;
const CustomOpFor<Activate> kActivate;
const CustomOpFor<ActivateQuantize> kActivateQuantize;
const ort::CustomOp* const kOps[] = {
    &kAccept,  &kFusedPagedAttention, &kFusedPagedAttentionInt8, &kLinear,
    &kPagedAttention, &kQuantizedLinear, &kQuantize, &kNorm, &kNormQuantize, &kActivate,
    &kActivateQuantize};

// One domain for the life of the process: a session keeps only a pointer to it.
ort::CustomOpDomain* domain() {
  static std::mutex mutex;
  static ort::CustomOpDomain* ready = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (ready == nullptr) {
    ort::CustomOpDomain* created = nullptr;
    check(ort::create_custom_op_domain("octavo", &created));
    for (const ort::CustomOp* op : kOps) check(ort::custom_op_domain_add(created, op));
    ready = created;
  }
  return ready;
}

ort::Status* too_old(const ort::ApiBase* base) {
  // Slot 0 exists in every version of the table.
  const ort::Api* oldest = base->get_api(1);
  if (oldest == nullptr) return nullptr;
  const std::string sentence = std::string("the Octavo kernels need ONNX Runtime 1.24 or later "
                                           "and this is ") +
                               base->get_version_string() + "; upgrade the onnxruntime package";
  return ort::create_status(oldest, ort::ErrorCode::kFail, sentence.c_str());
}

}  // namespace
}  // namespace octavo

OCTAVO_EXPORT octavo::ort::Status* RegisterCustomOps(octavo::ort::SessionOptions* options,
                                                     const octavo::ort::ApiBase* base) {
  using namespace octavo;
  const ort::Api* api = base->get_api(ort::kApiVersion);
  if (api == nullptr) return too_old(base);
  ort::api = api;
  return as_status([&] {
    selected_instruction_set();
    check(ort::add_custom_op_domain(options, domain()));
  });
}

OCTAVO_EXPORT int octavo_kernels_abi() { return octavo::kLibraryVersion; }

// The instruction set that kernels created now would use, or null where OCTAVO_CPU_ISA names one
// that this CPU or build does not have.
OCTAVO_EXPORT const char* octavo_kernels_isa() {
  try {
    return octavo::name_of(octavo::selected_features());
  } catch (const octavo::InvalidArgument&) {
    return nullptr;
  }
}
