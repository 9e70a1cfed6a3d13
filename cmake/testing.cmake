# What a test needs: the model's path in MORPHKV_TEST_MODEL, and the properties of its label.

# Configuring only asks where the model is kept. The test TestModel.IsThere fetches it, and CTest
# runs that one before any test of label `model`: so the others do without it.
if(NOT MORPHKV_TEST_MODEL AND MORPHKV_LLAMA_CPP)
  execute_process(
    COMMAND "${PROJECT_SOURCE_DIR}/scripts/setup" model-path
    OUTPUT_VARIABLE MORPHKV_TEST_MODEL OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "The tests need a model: see above what scripts/setup says, "
      "or set MORPHKV_TEST_MODEL to a GGUF file, or switch MORPHKV_BUILD_TESTS off.")
  endif()
  if("$ENV{MORPHKV_MODEL}" STREQUAL "")
    cmake_path(GET MORPHKV_TEST_MODEL PARENT_PATH models)  # <MORPHKV_CACHE>/models
    cmake_path(GET models PARENT_PATH cache)
    add_test(NAME TestModel.IsThere COMMAND "${PROJECT_SOURCE_DIR}/scripts/setup" model)
    set_tests_properties(TestModel.IsThere PROPERTIES
      LABELS model TIMEOUT 1800 FIXTURES_SETUP test_model
      ENVIRONMENT "MORPHKV_MODEL=;MORPHKV_CACHE=${cache}")
  endif()
endif()

# All that the tests of label `unit` run; what `make check` builds.
add_custom_target(unit_tests)

# Sets <out> to the properties of a test with this label. Tests of label `model` find the model's
# path in the environment variable MORPHKV_TEST_MODEL.
#
# The engine's threads sleep when they wait for one another (OMP_WAIT_POLICY). Left alone those of
# OpenMP spin, each in the way of the one that it waits for as soon as the machine has other work.
# Seconds of Slots.ATurnThatEndsEarlyTouchesNoOther, with two threads on two cores:
#                                     quiet   beside a busy process   beside builds, load 6 to 8
#   as OpenMP has it                   5.8          194                      174
#   OMP_WAIT_POLICY=passive            7.2                                    13
#   GOMP_SPINCOUNT=1000, 10000                                                17, 55
#   OMP_THREAD_LIMIT=1                 8.1                                    16
# The limit would leave no test with two threads.
function(morphkv_test_properties label out)
  if(label STREQUAL "model")
    set(properties TIMEOUT 1800 FIXTURES_REQUIRED test_model
      ENVIRONMENT "MORPHKV_TEST_MODEL=${MORPHKV_TEST_MODEL}")
  elseif(label STREQUAL "package")
    set(properties TIMEOUT 300 PROCESSORS 2)  # builds
  elseif(label STREQUAL "python")
    set(properties TIMEOUT 1800)
  elseif(label STREQUAL "unit")
    set(properties TIMEOUT 120)
  else()
    message(FATAL_ERROR "No test label ${label}: use unit, model, python or package")
  endif()
  set(${out} LABELS ${label} ENVIRONMENT_MODIFICATION OMP_WAIT_POLICY=set:passive ${properties}
    PARENT_SCOPE)
endfunction()
